"""The norm of the gradients, added to a traced step if the update does not compute it."""

from __future__ import annotations

import jax

from zerojax.graph.def_use import graph_of
from zerojax.optim.norm import global_norm
from zerojax.optim.wrap import full_precision
from zerojax.trace import marks
from zerojax.trace.updates import find_gradients
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import traced
from zerojax.xla.types import AnyJaxpr, Jaxpr, PyTree


def with_gradient_norm(closed: AnyJaxpr, results: tuple[Parts, PyTree]) -> AnyJaxpr:
    """Returns a traced step that also computes the norm of its gradients, ``grad_norm`` of the new
    ``ZeroOptState``, if its update does not and the dataflow shows which values are gradients.

    Args:
      closed: The step's jaxpr, from the state and the batch to ``results``.
      results: The shapes of the step's results.
    """
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    index = jax.tree.unflatten(jax.tree.structure(results), range(len(jaxpr.outvars)))[0]
    opt = index.opt_state.opt
    if marks.reach_optimizer(jaxpr) or not _is_constant(jaxpr, opt.grad_norm):
        return closed
    gradients = find_gradients(jaxpr, jax.tree.leaves((index.params, opt.inner, index.rest)))
    if not gradients:
        return closed
    outs = list(jaxpr.outvars)
    eqns, (outs[opt.grad_norm],) = traced(
        lambda *grads: global_norm([full_precision(x) for x in grads]), gradients
    )
    new = jaxpr.replace(eqns=[*jaxpr.eqns, *eqns], outvars=outs)
    return jaxprs.with_body(closed, new)


def _is_constant(jaxpr: Jaxpr, at: int) -> bool:
    """Returns whether a result is an argument, or computed from no variable."""
    eqn = graph_of(jaxpr).producer(jaxpr.outvars[at])
    return eqn is None or not jaxprs.variables(eqn.invars)
