"""Gradients of one matrix from adjacent products, which are added up and then reduced once.

Each product of a matrix has a gradient of its own. At stages 2 and 3 each would be reduced where it
is produced, because no unsharded array may wait for a later use. But here the other use follows at
once.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import NamedTuple

from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import propagate
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import LINEAR, PRODUCTS
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr

NEAR = 16
"""The most equations between adjacent products."""

_PASSES = LINEAR | {"add_any"}


class Sums(NamedTuple):
    """Gradients that are added up unreduced, and then reduced once.

    Attributes:
      reduced: The sums.
      added: The values from which they are computed, back to products, which are not reduced.
    """

    reduced: set[Atom]
    added: set[Atom]


def sums(
    jaxpr: Jaxpr,
    wants: Mapping[Atom, Spec],
    mesh: Mesh,
    *,
    of_layer: bool = False,
    in_place: Container[Atom] = (),
) -> Sums:
    """Finds sums of adjacent products. Sums of products farther from each other are included if
    together they have no more elements than the largest gradient, or if ``of_layer``: their terms
    stay unsharded until the last term exists.

    Args:
      jaxpr: An open jaxpr.
      wants: See :func:`zerojax.collectives.wanted.trace_back`.
      mesh: The mesh of all specs. A gradient that its spec pads is padded where it is computed, so
        that it is left out here.
      of_layer: Whether the jaxpr is one layer, in a loop over layers.
      in_place: Gradients that need no reduction, see :mod:`zerojax.collectives.in_place`.
    """
    graph = graph_of(jaxpr)
    candidates = [eqn for eqn in graph.named("add_any") if eqn.outvars[0] in wants]
    near, far = Sums(set(), set()), Sums(set(), set())
    for eqn in reversed(candidates):
        out = eqn.outvars[0]
        if layout.padded_shape(out.aval.shape, wants[out], mesh) != out.aval.shape:
            continue
        if out in near.added | far.added or (terms := _terms(eqn, graph, in_place)) is None:
            continue
        first = min(graph.place(graph.producer(v)) for v in terms)
        chosen = near if graph.place(eqn) - first <= NEAR else far
        chosen.reduced.add(out)
        chosen.added.update(terms)
    largest = max((v.aval.size for v in wants), default=0)
    if not of_layer and sum(v.aval.size for v in far.reduced) > largest:
        return near
    return Sums(near.reduced | far.reduced, near.added | far.added)


def _terms(eqn: Equation, graph: Graph, in_place: Container[Atom]) -> set[Atom] | None:
    """Returns the variables from which a sum is computed, back to products. None if one of them is
    computed otherwise, has another use or is among ``in_place``, or if the products add up
    different numbers of rows: one of them may not be a sum over the batch, and XLA does not
    reduce-scatter a sum that needs reduction only in part."""
    terms: set[Atom] = set()
    rows: set[int] = set()
    pending = jaxprs.variables(eqn.invars)
    if len(pending) != len(eqn.invars):
        return None
    while pending:
        v = pending.pop()
        producer = graph.producer(v)
        if producer is None or graph.times_used(v) != 1 or v in in_place:
            return None
        terms.add(v)
        if producer.primitive.name in _PASSES or propagate.reversible(producer):
            pending += jaxprs.variables(producer.invars)
        elif producer.primitive.name not in PRODUCTS:
            return None
        elif producer.primitive is prims.dot_general_p:
            (contracted, _), _ = jaxprs.param(producer, "dimension_numbers")
            rows.add(math.prod(producer.invars[0].aval.shape[i] for i in contracted))
    return terms if len(rows) <= 1 else None
