"""The micro-batch's program with the numbers of rows of the whole batch.

A mean over rows divides by their number. With the whole batch's number in its place each
micro-batch makes its part of the whole mean, so that the parts add up, gradients too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.analysis import Analysis, Path
from zerojax.accumulation.pairs import Pair, pairs
from zerojax.trace import marks
from zerojax.xla import compat


def with_numbers_of_whole(analysis: Analysis) -> list[Any]:
    """The micro-batch's equations in order, None where it has none."""
    return [
        None if pair.micro is None else _equation(pair, (i,), analysis)
        for i, pair in enumerate(analysis.pairs)
    ]


def _equation(pair: Pair, path: Path, analysis: Analysis) -> Any:
    whole, micro = pair
    changes: dict[str, Any] = {}
    for name, places in _bodies(micro).items():
        value = micro.params[name]
        if name == "branches":
            changes[name] = tuple(
                _body(w, m, (*path, at), analysis)
                for at, (w, m) in enumerate(zip(whole.params[name], value, strict=True))
            )
        else:
            changes[name] = _body(whole.params[name], value, (*path, places), analysis)
    eqn = micro
    if any(changes[name] is not micro.params[name] for name in changes):
        eqn = eqn.replace(params=micro.params | changes)
    if path in analysis.literals:
        return eqn
    atoms = list(zip(whole.invars, micro.invars, strict=True))
    if not any(_differ(w, m) for w, m in atoms):
        return eqn
    return eqn.replace(invars=[w if _differ(w, m) else m for w, m in atoms])


def _bodies(eqn: Any) -> dict[str, int]:
    """The parameters that hold programs which an analysis enters, and their places in a path."""
    if eqn.primitive is prims.scan_p:
        return {"jaxpr": 0}
    if eqn.primitive is prims.while_p:
        return {"body_jaxpr": 0, "cond_jaxpr": 1}
    if eqn.primitive is prims.cond_p:
        return {"branches": 0}
    return {marks.CALLS[eqn.primitive]: 0} if eqn.primitive in marks.CALLS else {}


def _body(whole: Any, micro: Any, path: Path, analysis: Analysis) -> Any:
    inside, outside = compat.open_jaxpr(micro)[0], compat.open_jaxpr(whole)[0]
    eqns = []
    for i, pair in enumerate(pairs(outside.eqns, inside.eqns)):
        if pair.micro is not None:
            eqns.append(_equation(pair, (*path, i), analysis))
    if all(new is old for new, old in zip(eqns, inside.eqns, strict=True)):
        return micro
    changed = inside.replace(eqns=eqns)
    return micro.replace(jaxpr=changed) if inside is not micro else changed


def _differ(whole: Any, micro: Any) -> bool:
    if not (isinstance(whole, core.Literal) and isinstance(micro, core.Literal)):
        return False
    return not np.ndim(whole.val) and bool(whole.val != micro.val)
