"""New parameters that exist before the step adds the update, in place of the step's own sum.

An optax optimizer returns the updates that the step adds to the parameters. If the optimizer has
computed the new parameters too, as in one pass over memory, the sum would read and write them once
more. So :func:`change` marks such an update, :func:`find_sums` finds the sums with it, and the new
parameters replace them.
"""

from __future__ import annotations

import jax
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import LABELS
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr


def _copies(eqn: Equation) -> bool:
    """Returns whether the result is the operand, in any dtype."""
    return eqn.primitive.name in LABELS or eqn.primitive.name == "convert_element_type"


def origin(jaxpr: Jaxpr, v: Atom) -> tuple[Atom, Equation | None]:
    """Returns the variable that ``v`` copies, past casts and labels, and the equation of the jaxpr
    that produces that variable, or None."""
    eqn = graph_of(jaxpr).producer(v)
    return origin(jaxpr, eqn.invars[0]) if eqn and _copies(eqn) else (v, eqn)


@jax.jit
def change(new: jax.Array, old: jax.Array, update: jax.Array) -> jax.Array:
    """Returns ``update``, marked so that ``new`` can replace ``old + update``."""
    # Not the argument itself, which jax would forward around the call.
    return marks.mark(update, marks.CHANGE)


def find_sums(jaxpr: Jaxpr) -> dict[Atom, Atom]:
    """Maps each variable that is ``old + update`` of a :func:`change`, in any dtype, to the
    variable that holds ``new``."""
    graph = graph_of(jaxpr)
    if not any(map(is_change, graph.named("jit"))):
        return {}

    def changed(term: Atom, other: Atom) -> Atom | None:
        """Returns the new value if ``other`` is a change of ``term``, else None."""
        _, eqn = origin(jaxpr, other)
        if eqn is None or not is_change(eqn):
            return None
        new, old, _ = eqn.invars
        return new if origin(jaxpr, term)[0] is origin(jaxpr, old)[0] else None

    replaced: dict[Atom, Atom] = {}
    for eqn in graph.named("add"):
        a, b = eqn.invars
        if (new := changed(a, b) or changed(b, a)) is not None:
            copies = [eqn.outvars[0]]
            while copies:
                v = copies.pop()
                replaced[v] = new
                copies += [x for use in graph.users(v) if _copies(use.equation)
                           for x in use.equation.outvars]  # fmt: skip
    return replaced


def is_change(eqn: Equation) -> bool:
    """Returns whether an equation is a call of :func:`change`."""
    if eqn.primitive is not prims.jit_p or jaxprs.param(eqn, "name") != "change":
        return False
    inside = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))[0].eqns
    return len(inside) == 1 and marks.is_mark(inside[0], marks.CHANGE)
