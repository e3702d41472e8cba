"""Products next to each other that one gather serves, and whose gradients one sum reduces.

What differentiates a product has two products for it: of a product with a matrix, one with each
tangent. A matrix would be gathered for either at stage 3, and a gradient reduced of either, because
no whole one may wait for a use that comes later. Here the other use comes at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import propagate
from zerojax.collectives.shard import Shard
from zerojax.graph.graph import Graph, graph_of
from zerojax.graph.primitives import LINEAR, PRODUCTS
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs

NEAR = 16
"""The most equations between uses that are next to each other."""

_PASSES = LINEAR | {"add_any"}

Wholes = dict[int, tuple[Shard, jax.Array]]
"""By ``id``, a shard and the same whole."""


def uses(jaxpr: Any) -> dict[int, Wholes]:
    """For each product, by ``id`` of its equation, that uses an operand as another one does nearby:
    where they share gathers. None of them waits for the other's result, as the backward pass does
    for the forward pass."""
    graph = graph_of(jaxpr)
    firsts: dict[Any, tuple[int, Any]] = {}
    shared: dict[int, Wholes] = {}
    products = graph.named(*PRODUCTS)
    for i, eqn in sorted((graph.place(eqn), eqn) for eqn in products):
        operands = jaxprs.variables(eqn.invars)
        for v in operands:
            at, first = firsts.get(v, (-1, None))
            if first is None or i - at > NEAR or _produced_after(graph, at, operands):
                firsts[v] = i, eqn
            else:
                shared[id(eqn)] = shared.setdefault(id(first), {})
    return shared


def _produced_after(graph: Graph, at: int, operands: Sequence[Any]) -> bool:
    """Whether an equation after the one at a place produces an operand."""
    made = [eqn for v in operands if (eqn := graph.producer(v)) is not None]
    return any(graph.place(eqn) > at for eqn in made)


class Sums(NamedTuple):
    """Gradients that are added up whole, and reduced then.

    Attributes:
      reduced: The sums.
      added: What they are made from, back to products, and is not reduced.
    """

    reduced: set[Any]
    added: set[Any]


def sums(jaxpr: Any, wants: Mapping[Any, Spec], mesh: Mesh, *, of_layer: bool = False) -> Sums:
    """Sums of products next to each other. Of those farther apart all, if together they have no
    more elements than the largest gradient, or are ``of_layer``; they wait whole for each other.

    Args:
      jaxpr: An open jaxpr.
      wants: See :func:`zerojax.collectives.wanted.trace_back`.
      mesh: Of all specs. A gradient that is padded for its spec is so where it is made.
      of_layer: The jaxpr is one layer's, in a loop over layers.
    """
    graph = graph_of(jaxpr)
    candidates = [eqn for eqn in graph.named("add_any") if eqn.outvars[0] in wants]
    near, far = Sums(set(), set()), Sums(set(), set())
    for eqn in reversed(candidates):
        out = eqn.outvars[0]
        if layout.padded(out.aval.shape, wants[out], mesh) != out.aval.shape:
            continue
        if out in near.added | far.added or (terms := _terms(eqn, graph)) is None:
            continue
        first = min(graph.place(graph.producer(v)) for v in terms)
        chosen = near if graph.place(eqn) - first <= NEAR else far
        chosen.reduced.add(out)
        chosen.added.update(terms)
    largest = max((v.aval.size for v in wants), default=0)
    if not of_layer and sum(v.aval.size for v in far.reduced) > largest:
        return near
    return Sums(near.reduced | far.reduced, near.added | far.added)


def _terms(eqn: Any, graph: Graph) -> Any:
    """The variables from which a sum is made, back to products; None where one of them is made
    otherwise, or used besides, or where the products add up different numbers of rows: one may not
    be of the batch, and XLA does not reduce-scatter a sum of which only a part is to be reduced."""
    terms: set[Any] = set()
    rows: set[int] = set()
    left = jaxprs.variables(eqn.invars)
    if len(left) != len(eqn.invars):
        return None
    while left:
        v = left.pop()
        maker = graph.producer(v)
        if maker is None or graph.times_used(v) != 1:
            return None
        terms.add(v)
        if maker.primitive.name in _PASSES or propagate.reversible(maker):
            left += jaxprs.variables(maker.invars)
        elif maker.primitive.name not in PRODUCTS:
            return None
        elif maker.primitive is prims.dot_general_p:
            (contracted, _), _ = jaxprs.param(maker, "dimension_numbers")
            rows.add(math.prod(maker.invars[0].aval.shape[i] for i in contracted))
    return terms if len(rows) <= 1 else None
