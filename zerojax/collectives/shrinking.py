"""Gradients that shrink after the sum over rows, and are reduced over the devices after that.

A relative position bias is looked up in a small table for each pair of positions, and added to the
scores of every row. Its cotangent is summed over the rows, [heads, positions, positions], and then
added up in the table's gradient, [buckets, heads]. If every equation from that sum to the table is
linear, each device runs them on the sum over its own rows, and only the table's gradient is
all-reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as prims

from zerojax.collectives import propagate
from zerojax.collectives.gathering import Gatherer, plain
from zerojax.collectives.reduction import add_up, pin_to_devices
from zerojax.devices.mesh import sequence_size
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import LINEAR
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr

LEAST = 4
"""The fewest elements that are added up in a table's gradient, as a multiple of its elements."""


@dataclass(frozen=True, eq=False)
class OwnSum:
    """Each device's sum over its own rows: ``value`` [devices, *shape], each on its device. Unlike
    on a :class:`zerojax.collectives.partial_sums.PartialSum`, equations run on it before it is
    reduced.
    """

    value: jax.Array


class OwnSumEquations(NamedTuple):
    """The equations of a program that run on each device's own sum.

    Attributes:
      sums: By result of a sum, the dimension of rows over which it sums.
      results: The results of all the equations.
      ends: The results that are reduced over the devices: gradients of tables.
    """

    sums: Mapping[Atom, int]
    results: frozenset[Atom]
    ends: frozenset[Atom]

    def run(
        self, eqn: Equation, values: Sequence[Any], wants: Mapping[Atom, Spec], gatherer: Gatherer
    ) -> OwnSum | jax.Array:
        """Runs one of the equations; returns an :class:`OwnSum`, or a reduced gradient."""
        (out,) = eqn.outvars
        values = [plain(x) for x in values]
        if out in self.sums:
            at, n = self.sums[out], gatherer.mesh.size
            rows = jnp.moveaxis(values[0], at, 0)
            rows = pin_to_devices(rows.reshape(n, rows.shape[0] // n, *rows.shape[1:]), gatherer)
            axes = [d for d in jaxprs.param(eqn, "axes") if d != at]
            # Dimensions: the devices, the device's own rows, and the others of `values[0]`.
            own = add_up(rows, 1, *(d + 2 - (d > at) for d in axes))
            return OwnSum(pin_to_devices(own, gatherer))
        parts = [x.value if isinstance(x, OwnSum) else x for x in values]
        own = jax.vmap(
            lambda *operands: jaxprs.bind(eqn, list(operands))[0],
            in_axes=[0 if isinstance(x, OwnSum) else None for x in values],
        )(*parts)
        own = pin_to_devices(own, gatherer)
        return gatherer.scatter(add_up(own, 0), wants[out]) if out in self.ends else OwnSum(own)


def find(
    jaxpr: Jaxpr, wants: Mapping[Atom, Spec], rows: int | None, gatherer: Gatherer
) -> OwnSumEquations:
    """Finds the gradients of tables that are reduced last.

    Args:
      jaxpr: An open jaxpr.
      wants: See :func:`zerojax.collectives.wanted.trace_back`.
      rows: The number of rows of the batch; None if unknown.
      gatherer: Reduces gradients.
    """
    mesh = gatherer.mesh
    if rows is None or rows % mesh.size or not gatherer.sums_own_rows or sequence_size(mesh) > 1:
        return OwnSumEquations({}, frozenset(), frozenset())
    graph = graph_of(jaxpr)
    sums: dict[Atom, int] = {}
    results, ends = set[Atom](), set[Atom]()
    for eqn in graph.named("scatter-add", "jit"):
        if len(eqn.outvars) != 1 or (out := eqn.outvars[0]) not in wants:
            continue
        added = [v for v in jaxprs.variables(eqn.invars) if v.aval.size >= LEAST * out.aval.size]
        added = [v for v in added if _is_floating(v)]
        if len(added) != 1 or not _adds_up(eqn, eqn.invars.index(added[0]), graph):
            continue
        if (found := _sums(added[0], graph, rows)) is not None:
            sums |= found[0]
            results |= {out, *found[1]}
            ends.add(out)
    return OwnSumEquations(sums, frozenset(results), frozenset(ends))


def _adds_up(eqn: Equation, at: int, graph: Graph) -> bool:
    """Returns whether an equation adds the entries of its operand ``at`` up in zeros, directly or
    in a jitted function."""
    if eqn.primitive is prims.scatter_add_p:
        return at == 2 and graph.is_zeros(eqn.invars[0])
    if eqn.primitive is not prims.jit_p:
        return False
    (body,) = jaxprs.bodies(eqn)
    inner, v = graph_of(body), body.invars[at]
    while inner.times_used(v) == 1 and inner.users(v):
        ((user, position),) = inner.users(v)
        if not _is_linear(user):
            is_last = body.outvars == user.outvars
            return is_last and _adds_up(user, position, inner)
        (v,) = user.outvars
    return False


def _sums(v: Atom, graph: Graph, rows: int) -> tuple[dict[Atom, int], set[Atom]] | None:
    """Returns the sums over rows from which a value is computed, each with its dimension of rows,
    and all values between; None if the value is not linear in such sums, or one of them has another
    use."""
    sums, results, pending = dict[Atom, int](), set[Atom](), [v]
    while pending:
        v = pending.pop()
        eqn = graph.producer(v)
        if eqn is None or graph.times_used(v) != 1:
            return None
        results.add(v)
        operands = jaxprs.variables(eqn.invars)
        if _is_linear(eqn) and len(operands) == len(eqn.invars):
            pending += operands
            continue
        if eqn.primitive is not prims.reduce_sum_p or not _is_floating(v):
            return None
        shape = operands[0].aval.shape
        # Rows come first: a later dimension of the same size is one of tokens or positions.
        if rows not in shape or (at := shape.index(rows)) not in jaxprs.param(eqn, "axes"):
            return None
        sums[v] = at
    return sums, results


def _is_linear(eqn: Equation) -> bool:
    """Returns whether an equation adds, moves, negates or rounds floating values."""
    linear = eqn.primitive.name in LINEAR or eqn.primitive.name == "add_any"
    floats = all(map(_is_floating, (*eqn.invars, *eqn.outvars)))
    return floats and (linear or propagate.reversible(eqn))


def _is_floating(atom: Atom) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)
