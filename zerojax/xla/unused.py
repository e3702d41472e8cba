"""What the results of a jaxpr are not made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.interpreters import partial_eval

from zerojax.xla import jaxprs


def used_arguments(closed: Any) -> list[bool]:
    """For each argument of a jaxpr, whether a result or an effect may be made from it.

    Calls, loops and choices are looked into.
    """
    return list(partial_eval.dce_jaxpr(jaxprs.open_jaxpr(closed)[0], True)[1])


def unused(jaxpr: Any) -> list[Any]:
    """The equations of an open jaxpr from which no result and no effect is computed, last first.

    Calls, loops and choices are taken for one equation, which uses all of its operands.
    """
    needed, found = {*jaxprs.variables(jaxpr.outvars)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
        else:
            found.append(eqn)
    return found


def without_unused(jaxpr: Any, whole: Callable[[Any], bool]) -> Any:
    """An open jaxpr that makes nothing, in calls and loops neither, that no result is made from.

    Args:
      jaxpr: Keeps its arguments and results.
      whole: Whether an equation keeps all its operands, if any result of it is used.
    """
    needed, kept = {*jaxprs.variables(jaxpr.outvars)}, []
    for eqn in reversed(jaxpr.eqns):
        used = [v in needed for v in eqn.outvars]
        if not whole(eqn):
            eqn = jaxprs.pruned(eqn, used)
        elif not any(used) and not eqn.effects:
            eqn = None
        if eqn is not None:
            kept.append(eqn)
            needed.update(jaxprs.variables(eqn.invars))
    return jaxpr.replace(eqns=kept[::-1])
