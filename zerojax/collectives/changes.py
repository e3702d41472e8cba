"""What an optimizer makes of a parameter, found again where the step adds it.

optax has an optimizer return what is to be added to the parameters. Where the new ones are there
already, as after an update in one pass over memory, the sum would read and write them once more.
So the step's sum is replaced by what it would give.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax import compat, marks

SAME = frozenset(["convert_element_type", "copy", "copy_p", "name", "sharding_constraint"])
"""Equations that make nothing new."""


@jax.jit
def change(new: jax.Array, old: jax.Array, update: jax.Array) -> jax.Array:
    """``update``, and the note that ``old + update`` is to be ``new``."""
    # Not the argument itself, which jax would take out of the call.
    return checkpoint_name(update, marks.CHANGE)


def sums(jaxpr: Any) -> dict[Any, Any]:
    """For each variable that is such a sum, in whatever dtype, the variable that holds ``new``."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def origin(v: Any) -> Any:
        while not isinstance(v, core.Literal) and v in made and made[v].primitive.name in SAME:
            v = made[v].invars[0]
        return v

    def changed(one: Any, other: Any) -> Any:
        """The new value, if ``other`` is a change of ``one``."""
        v = origin(other)
        eqn = None if isinstance(v, core.Literal) else made.get(v)
        if eqn is None or not _is_change(eqn):
            return None
        new, old, _ = eqn.invars
        return new if origin(one) is origin(old) else None

    found: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        first = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name == "add":
            a, b = eqn.invars
            if (new := changed(a, b) or changed(b, a)) is not None:
                found[eqn.outvars[0]] = new
        elif eqn.primitive.name in SAME and not isinstance(first, core.Literal) and first in found:
            found[eqn.outvars[0]] = found[first]
    return found


def _is_change(eqn: Any) -> bool:
    if eqn.primitive is not prims.jit_p or eqn.params["name"] != "change":
        return False
    inside = compat.open_jaxpr(eqn.params["jaxpr"])[0].eqns
    return len(inside) == 1 and marks.is_mark(inside[0], marks.CHANGE)
