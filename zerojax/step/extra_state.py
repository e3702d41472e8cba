"""How the state beside the parameters is sharded where a traced step makes it anew."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
from jax.extend import core

from zerojax.graph.graph import Graph, graph_of
from zerojax.graph.primitives import ELEMENTWISE
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.plan import Plan
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs


def wanted_specs(plan: Plan, jaxpr: Any, results: tuple[Parts, Any]) -> list[Spec | None]:
    """For each result of a step the spec that what makes it should have; None for most.

    A second network's moments are sharded, and so should its gradients be where they are made. An
    average of the new parameters follows from them element by element, and needs nothing.

    Args:
      plan: PartitionSpec of every leaf.
      jaxpr: Of the step.
      results: The shapes of its results.
    """
    numbers = jax.tree.unflatten(jax.tree.structure(results), range(len(jaxpr.outvars)))
    new_params = {*jaxprs.variables(jaxpr.outvars[i] for i in jax.tree.leaves(numbers[0].params))}
    specs: list[Spec | None] = [None] * len(jaxpr.outvars)
    for i, leaf in zip(jax.tree.leaves(numbers[0].rest), plan.leaves["rest"], strict=True):
        out = jaxpr.outvars[i]
        if leaf.shape and not _follows_from(out, new_params, graph_of(jaxpr)):
            specs[i] = layout.full(leaf.spec, len(leaf.shape))
    return specs


def _follows_from(v: Any, variables: Collection[Any], graph: Graph) -> bool:
    """Whether element by element a variable is made from one of others of its shape."""
    left, seen = [v], set[Any]()
    while left:
        v = left.pop()
        if isinstance(v, core.Literal) or v in seen:
            continue
        if v in variables:
            return True
        seen.add(v)
        eqn = graph.producer(v)
        if eqn is not None and eqn.primitive.name in ELEMENTWISE:
            left += [x for x in eqn.invars if x.aval.shape == v.aval.shape]
    return False
