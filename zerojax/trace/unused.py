"""Gradients that a step makes and its update does not use: those of frozen parameters."""

from __future__ import annotations

from typing import Any

from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.unused import unused, without_unused


def without_unused_gradients(closed: Any) -> Any:
    """A traced step that makes no gradient which its update does not use.

    XLA would drop most of them by itself, but not those that a barrier of ours, or another
    gradient in the same loop, stands beside. A step that uses all its gradients stays as it is.

    Args:
      closed: The step's jaxpr and its constants.
    """
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    names = (marks.GRADIENT, marks.UNUSED)
    if not any(marks.is_mark(eqn, name) for eqn in unused(jaxpr) for name in names):
        return closed
    pruned = without_unused(jaxpr, lambda eqn: marks.holds(eqn, marks.CHANGE))
    return jaxprs.with_body(closed, pruned)
