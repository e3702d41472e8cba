"""The target specs of new state that no wrapped optimizer computes, such as a second network."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zerojax.graph.def_use import graph_of
from zerojax.plan.layout import Spec
from zerojax.plan.state_sharding import Plan
from zerojax.trace import marks
from zerojax.trace.updates import origins
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Jaxpr, PyTree


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
