"""Gradients that a step computes and its update does not use: those of frozen parameters."""

from __future__ import annotations

from zerojax.graph.def_use import graph_of
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Equation
from zerojax.xla.unused import without_unused


def without_unused_gradients(closed: AnyJaxpr) -> AnyJaxpr:
    """Removes the gradients from a traced step that its update does not use. A step that uses all
    its gradients is returned unchanged.

    Args:
      closed: The step's jaxpr and its constants.
    """
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    used = graph_of(without_unused(jaxpr, jaxprs.whole)).results(_is_gradient)
    if used == graph_of(jaxpr).results(_is_gradient):
        return closed
    # XLA itself would keep a gradient that shares a barrier of zerojax's, or a loop, with another.
    return jaxprs.with_body(closed, without_unused(jaxpr))


def _is_gradient(eqn: Equation) -> bool:
    return marks.is_mark(eqn, marks.GRADIENT) or marks.is_mark(eqn, marks.UNUSED)
