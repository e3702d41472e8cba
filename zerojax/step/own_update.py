"""Gradients that reach no wrapped optimizer: those of a second network, or of a step with an
optimizer of its own. Their norm, and the target specs of the state that is computed from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zerojax.graph.def_use import graph_of
from zerojax.optim.norm import global_norm
from zerojax.optim.wrap import full_precision
from zerojax.plan.layout import Spec
from zerojax.plan.state_sharding import Plan
from zerojax.trace import marks
from zerojax.trace.updates import find_gradients, origins
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import traced
from zerojax.xla.types import AnyJaxpr, Atom, Jaxpr, PyTree


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
    eqn = graph_of(jaxpr).producer(jaxpr.outvars[opt.grad_norm])
    is_constant = eqn is None or not jaxprs.variables(eqn.invars)
    if marks.reach_optimizer(jaxpr) or not is_constant:
        return closed
    gradients = find_gradients(jaxpr, jax.tree.leaves((index.params, opt.inner, index.rest)))
    if not gradients:
        return closed
    outs = list(jaxpr.outvars)
    eqns, (outs[opt.grad_norm],) = traced(
        lambda *grads: global_norm([full_precision(x) for x in grads]), gradients
    )
    return jaxprs.with_body(closed, jaxpr.replace(eqns=[*jaxpr.eqns, *eqns], outvars=outs))


def wanted_specs(plan: Plan, jaxpr: Jaxpr, results: tuple[Parts, PyTree]) -> list[Spec | None]:
    """Returns, for each result of a step, the target spec of the gradient from which the result is
    computed element by element; None for results that need no spec.

    The moments of a second network are sharded, and its gradients should be sharded where they are
    produced. Gradients that stay unsharded are reduced where they are produced too, so that
    activations need not wait for them. An average of the new parameters is computed from these
    element by element, and needs no spec. Nor do parameters and moments whose gradients are marked.

    Args:
      plan: PartitionSpec of every leaf.
      jaxpr: The step's jaxpr.
      results: The shapes of the step's results.
    """
    numbers = jax.tree.unflatten(jax.tree.structure(results), range(len(jaxpr.outvars)))[0]
    leaves = [*zip(jax.tree.leaves(numbers.rest), plan.leaves["rest"], strict=True)]
    new_params = set[Atom]()
    if marks.reach_optimizer(jaxpr):
        new_params = {*jaxprs.variables(jaxpr.outvars[i] for i in jax.tree.leaves(numbers.params))}
    else:
        leaves += zip(jax.tree.leaves(numbers.params), plan.compute, strict=True)
        opt_state = jax.tree.leaves(numbers.opt_state.opt)
        leaves += zip(opt_state, plan.leaves["opt_state"], strict=True)
    specs: list[Spec | None] = [None] * len(jaxpr.outvars)
    for i, leaf in leaves:
        out = jaxpr.outvars[i]
        floating = jnp.issubdtype(out.aval.dtype, jnp.inexact)
        if floating and not origins(out, new_params, graph_of(jaxpr)):
            specs[i] = leaf.full_spec
    return specs
