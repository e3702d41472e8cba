"""The arguments and equations of a jaxpr that its results do not need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from jax.extend import core
from jax.interpreters import partial_eval

from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Equation, Jaxpr

Prune = Callable[[Equation, Sequence[bool]], Equation | None]
"""Function from an equation, and whether each of its results is used, to the equation in a form
that computes the used results; None if nothing needs it."""


def used_arguments(closed: AnyJaxpr) -> list[bool]:
    """Returns, for each argument of a jaxpr, whether a result or an effect may depend on it.

    The analysis enters calls, loops and conditionals.
    """
    return list(partial_eval.dce_jaxpr(cast(core.Jaxpr, jaxprs.open_jaxpr(closed)[0]), True)[1])


def without_unused(jaxpr: Jaxpr, prune: Prune = jaxprs.pruned) -> Jaxpr:
    """Removes all values that no result or effect of a jaxpr depends on.

    Args:
      jaxpr: The open jaxpr, which keeps its arguments and results.
      prune: Decides what is left of an equation. By default, values in calls and loops are removed
        too; with :func:`zerojax.xla.jaxprs.whole`, a call or loop that stays uses all its operands.
    """
    needed, kept = {*jaxprs.variables(jaxpr.outvars)}, []
    for eqn in reversed(jaxpr.eqns):
        left = prune(eqn, [v in needed for v in eqn.outvars])
        if left is not None:
            kept.append(left)
            needed.update(jaxprs.variables(left.invars))
    return jaxpr.replace(eqns=kept[::-1])
