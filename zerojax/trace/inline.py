"""A jaxpr with what it calls written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from zerojax.trace import marks
from zerojax.xla import compat


def inlined(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr; the calls in it (jit, remat, custom derivatives) leave no trace."""
    jaxpr, consts = compat.open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        if eqn.primitive in marks.CALLS:
            outs = inlined(eqn.params[marks.CALLS[eqn.primitive]], values)
        else:
            with eqn.ctx.manager:
                outs = [*marks.bind(eqn, values)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def flat(closed: Any) -> Any:
    """The closed jaxpr of the same function without calls."""
    shapes = []
    for v in compat.open_jaxpr(closed)[0].invars:
        weak = getattr(v.aval, "weak_type", False)
        shapes.append(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=weak))
    return jax.make_jaxpr(lambda *args: inlined(closed, args))(*shapes)
