"""The micro-batch's program with the numbers of rows of the whole batch.

A mean over rows divides by their number. With the whole batch's number in its place each
micro-batch makes its part of the whole mean, so that the parts add up, gradients too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend import core

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import Path
from zerojax.accumulation.pairs import EquationPair, pairs
from zerojax.xla import jaxprs


def with_numbers_of_whole(analysis: Analysis) -> list[Any]:
    """The micro-batch's equations in order, None where it has none."""
    return [
        None if pair.micro is None else _equation(pair, (i,), analysis)
        for i, pair in enumerate(analysis.pairs)
    ]


def _equation(pair: EquationPair, path: Path, analysis: Analysis) -> Any:
    whole, micro = pair
    changes: dict[str, Any] = {}
    for at, name in enumerate(jaxprs.programs(micro)):
        w, m = jaxprs.param(whole, name), jaxprs.param(micro, name)
        if isinstance(m, tuple):
            both = enumerate(zip(w, m, strict=True))
            changes[name] = tuple(_body(*each, (*path, i), analysis) for i, each in both)
        else:
            changes[name] = _body(w, m, (*path, at), analysis)
    eqn = micro
    if any(changes[name] is not micro.params[name] for name in changes):
        eqn = eqn.replace(params=micro.params | changes)
    atoms = list(zip(whole.invars, micro.invars, strict=True))
    if path in analysis.literals or not any(_differ(w, m) for w, m in atoms):
        return eqn
    return eqn.replace(invars=[w if _differ(w, m) else m for w, m in atoms])


def _body(whole: Any, micro: Any, path: Path, analysis: Analysis) -> Any:
    inside, outside = jaxprs.open_jaxpr(micro)[0], jaxprs.open_jaxpr(whole)[0]
    both = enumerate(pairs(outside.eqns, inside.eqns))
    eqns = [_equation(pair, (*path, i), analysis) for i, pair in both if pair.micro is not None]
    if all(new is old for new, old in zip(eqns, inside.eqns, strict=True)):
        return micro
    return jaxprs.with_body(micro, inside.replace(eqns=eqns))


def _differ(whole: Any, micro: Any) -> bool:
    if not (isinstance(whole, core.Literal) and isinstance(micro, core.Literal)):
        return False
    return not np.ndim(whole.val) and bool(whole.val != micro.val)
