"""The sharding of new state that no optimizer of ours computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.graph.graph import graph_of
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.plan import Plan
from zerojax.trace import marks
from zerojax.trace.updates import origins
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs


def wanted_specs(plan: Plan, jaxpr: Any, results: tuple[Parts, Any]) -> list[Spec | None]:
    """For each result of a step the spec of what it is computed from; None for most.

    A second network's moments are sharded, and so should its gradients be where they are produced.
    Gradients that stay unsharded are reduced there too: activations need not wait for them. An
    average of the new parameters follows from them element by element, and needs nothing. Neither
    does a state whose optimizer marks its gradients.

    Args:
      plan: PartitionSpec of every leaf.
      jaxpr: Of the step.
      results: The shapes of its results.
    """
    numbers = jax.tree.unflatten(jax.tree.structure(results), range(len(jaxpr.outvars)))[0]
    leaves = [*zip(jax.tree.leaves(numbers.rest), plan.leaves["rest"], strict=True)]
    new_params = set[Any]()
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
            specs[i] = layout.full(leaf.spec, len(leaf.shape))
    return specs
