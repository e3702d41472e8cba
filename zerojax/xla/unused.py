"""The arguments and equations of a jaxpr that its results do not need."""

from __future__ import annotations

from typing import cast

from jax.extend import core
from jax.interpreters import partial_eval

from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Equation, Jaxpr


def used_arguments(closed: AnyJaxpr) -> list[bool]:
    """Returns, for each argument of a jaxpr, whether a result or an effect may depend on it.

    The analysis enters calls, loops and conditionals.
    """
    return list(partial_eval.dce_jaxpr(cast(core.Jaxpr, jaxprs.open_jaxpr(closed)[0]), True)[1])


def unused(jaxpr: Jaxpr) -> list[Equation]:
    """Returns the equations of an open jaxpr that no result and no effect depends on, last first.

    A call, loop or conditional counts as one equation, which uses all of its operands.
    """
    needed, found = {*jaxprs.variables(jaxpr.outvars)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
        else:
            found.append(eqn)
    return found


def without_unused(jaxpr: Jaxpr) -> Jaxpr:
    """Removes all values, also in calls and loops, that no result or effect of a jaxpr depends on.

    Args:
      jaxpr: The open jaxpr, which keeps its arguments and results.
    """
    needed, kept = {*jaxprs.variables(jaxpr.outvars)}, []
    for eqn in reversed(jaxpr.eqns):
        pruned = jaxprs.pruned(eqn, [v in needed for v in eqn.outvars])
        if pruned is not None:
            kept.append(pruned)
            needed.update(jaxprs.variables(pruned.invars))
    return jaxpr.replace(eqns=kept[::-1])
