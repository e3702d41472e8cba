"""What an optimizer makes of a parameter, recognized where the step adds it.

An optax optimizer returns what is to be added to the parameters. Where the new parameters exist
already, as after an update in one pass over memory, the sum would read and write them once more.
So the new parameters stand in for the step's sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.trace import marks
from zerojax.trace.elementwise import LABELS
from zerojax.xla import jaxprs


def _copies(eqn: Any) -> bool:
    """Whether the result is the operand, in whatever dtype."""
    return eqn.primitive.name in LABELS or eqn.primitive.name == "convert_element_type"


def origins(jaxpr: Any) -> Callable[[Any], tuple[Any, Any]]:
    """A function from a variable to the one that it copies, past equations that make nothing new,
    and the equation of the jaxpr that makes that one, or None."""
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def origin(v: Any) -> tuple[Any, Any]:
        eqn = None if isinstance(v, core.Literal) else producers.get(v)
        return origin(eqn.invars[0]) if eqn and _copies(eqn) else (v, eqn)

    return origin


@jax.jit
def change(new: jax.Array, old: jax.Array, update: jax.Array) -> jax.Array:
    """``update``, and the note that ``old + update`` is to be ``new``."""
    # Not the argument itself, which jax would take out of the call.
    return checkpoint_name(update, marks.CHANGE)


def find_sums(jaxpr: Any) -> dict[Any, Any]:
    """For each variable that is such a sum, in whatever dtype, the variable that holds ``new``."""
    if not any(map(is_change, jaxpr.eqns)):
        return {}
    origin = origins(jaxpr)

    def changed(one: Any, other: Any) -> Any:
        """The new value, if ``other`` is a change of ``one``."""
        _, eqn = origin(other)
        if eqn is None or not is_change(eqn):
            return None
        new, old, _ = eqn.invars
        return new if origin(one)[0] is origin(old)[0] else None

    replaced: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        first = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name == "add":
            a, b = eqn.invars
            if (new := changed(a, b) or changed(b, a)) is not None:
                replaced[eqn.outvars[0]] = new
        elif not isinstance(first, core.Literal) and first in replaced and _copies(eqn):
            replaced[eqn.outvars[0]] = replaced[first]
    return replaced


def is_change(eqn: Any) -> bool:
    if eqn.primitive is not prims.jit_p or jaxprs.param(eqn, "name") != "change":
        return False
    inside = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))[0].eqns
    return len(inside) == 1 and marks.is_mark(inside[0], marks.CHANGE)
