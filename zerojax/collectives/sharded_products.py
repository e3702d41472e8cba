"""Products with a weight that stays sharded, because its activations have fewer bytes.

A wide layer with few rows, or the head of a large vocabulary, multiplies less data than it stores:
all-gathers of the weight and the reduce-scatter of its gradient would send more bytes than the
activations have. So each device multiplies all rows by its own shard:

- A weight that is sharded along an output dimension multiplies all rows, which are all-gathered.
  Each device computes its columns of the result.
- A weight that is sharded along a contracted dimension multiplies its columns of all rows. Each
  device computes a partial sum of the result, which is reduce-scattered to rows.
- A gradient needs no reduction: each device computes its shard from all rows of one operand, which
  are all-gathered, and its columns of the other operand.

Columns are kept as columns until an equation needs rows: between two layers of which the second
contracts the columns of the first, nothing is sent. Rows that several products need are gathered
once, as long as the gathered rows together have no more bytes than a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from zerojax.collectives import decisions
from zerojax.collectives.gathering import AllRows, Gatherer, Scope, plain
from zerojax.collectives.reduction import cut_evenly
from zerojax.collectives.shard import Shard
from zerojax.devices.mesh import axis_size, batch_axes
from zerojax.graph.contractions import RESULT, Contraction
from zerojax.graph.rows import RowDimensions
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation, Value

_TIMES = 2
"""The fewest bytes of the weight, as a multiple of the bytes that its product sends: a gather of
the weight can run ahead of the product, while activations are waited for."""


_LEAST = 2**20
"""The fewest bytes that a product sends in each iteration of a loop: many small collectives, as of
a loop over time, take longer than one gather before the loop."""


class Product(NamedTuple):
    """A product of which one array stays sharded: an operand, or the result.

    Attributes:
      eqn: The equation, a :class:`zerojax.graph.contractions.Contraction`.
      columns: By position, the sharded dimension of this array, and the same dimension of another
        one.
      sent: The position of the third array, which is all-gathered if it is an operand, and
        reduce-scattered if it is the result.
      rows: The dimensions of the third array that the weight, or its gradient, lacks.
      size: The bytes of the array that stays sharded.
    """

    eqn: Equation
    columns: Mapping[int, int]
    sent: int
    rows: Sequence[int]
    size: int

    def run(
        self, values: Sequence[Value], gatherer: Gatherer, scope: Scope, where: str = decisions.USE
    ) -> jax.Array:
        """Returns the result for these operands, with the ledger's place ``where``."""
        values = [plain(x) for x in values]
        operands = [
            _by_column(x, self.columns[i], gatherer) if i in self.columns else x
            for i, x in enumerate(values)
        ]
        with gatherer.ledger.place(where, "its activations have fewer bytes than the weight"):
            if self.sent != RESULT:
                operands[self.sent] = self._all_rows(values, gatherer, scope)
            (result,) = jaxprs.bind(self.eqn, operands)
            if self.sent != RESULT:
                return _by_column(result, self.columns[RESULT], gatherer)
            by_row = self._by_row(result.shape, gatherer, scope)
            gatherer.ledger.reduces(result, (None,) * result.ndim, by_row)
            return gatherer.constrain(result, by_row)

    def _all_rows(self, values: Sequence[jax.Array], gatherer: Gatherer, scope: Scope) -> jax.Array:
        """Returns all rows of the operand that is sent."""
        x = values[self.sent]
        _, known = scope.emitted.all_rows.get(id(x), (x, None))
        if known is not None:
            return known
        was_dropped = scope.emitted.all_rows.pop(id(x), None) is not None
        # XLA would merge this gather with that of the rows that were dropped, and keep them in
        # between.
        source = lax.optimization_barrier((x, values[1 - self.sent]))[0] if was_dropped else x
        by_row, unsharded = self._by_row(x.shape, gatherer, scope), (None,) * x.ndim
        # Otherwise XLA may compute all rows on each device.
        source = gatherer.constrain(source, by_row)
        gatherer.ledger.gathers(source, by_row, unsharded)
        gathered = gatherer.constrain(source, unsharded)
        scope.emitted.all_rows[id(x)] = x, gathered
        if not scope.share:
            # Else the backward pass would find the rows of all layers gathered.
            _drop_oldest(scope.emitted.all_rows, self.size)
        return gathered

    def _by_row(self, shape: Sequence[int], gatherer: Gatherer, scope: Scope) -> Spec:
        """Returns the spec of the array that is sent, by rows."""
        candidates = _divisible(shape, self.rows, gatherer)
        sent = (*self.eqn.invars, *self.eqn.outvars)[self.sent]
        of_batch = [d for d in candidates if d in scope.row_dims.dims(sent)]
        return _spec(len(shape), (of_batch or candidates)[0], gatherer)


def find_product(
    eqn: Equation,
    at: int,
    spec: Spec,
    gatherer: Gatherer,
    dims: RowDimensions,
    runs: int | None = None,
) -> Product | None:
    """Returns an equation as a product of which array ``at`` stays sharded by ``spec``; None if the
    array is gathered, or reduced.

    Args:
      eqn: An equation.
      at: 0 or 1 for a weight that is an operand, 2 for a gradient, the result.
      spec: The array's spec.
      gatherer: Gathers parameters and reduces gradients.
      dims: The dimensions along which values need not be complete.
      runs: The iterations of a loop that would gather the weight once, before it, and reduce the
        sum of the gradients once, after it; None outside such loops.
    """
    contraction = Contraction.of(eqn)
    if contraction is None or any(contraction.batched) or not multiplies_shards(gatherer):
        return None
    if gatherer.sent.in_fp8(spec):  # the codes of a gathered matrix have one scale
        return None
    arrays = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    split = cut_evenly(arrays[at].shape, spec, gatherer)
    if split is None or arrays[at].size < gatherer.thresholds.in_place:
        return None
    names = contraction.names
    name = names[at][split]
    (sent,) = (i for i in range(3) if name not in names[i])
    columns = {i: names[i].index(name) for i in range(3) if i != sent}
    (other,) = columns.keys() - {at}
    rows = [d for d, each in enumerate(names[sent]) if each not in names[at]]
    sizes = [*map(jaxprs.nbytes, arrays)]
    if at == RESULT:
        # So that a gradient summed in float32 follows its weight.
        sizes[at] = arrays[at].size * arrays[sent].dtype.itemsize
    times, least = (_TIMES, 0) if runs is None else (runs, _LEAST)
    even = _divisible(arrays[sent].shape, rows, gatherer)
    if not even or not least <= sizes[sent] <= sizes[at] / times:
        return None
    # If another equation needs rows: an all-to-all of a device's columns.
    moved = sizes[sent] + sizes[other] / axis_size(gatherer.mesh, gatherer.axis)
    v = (*eqn.invars, *eqn.outvars)[other]
    if times * moved > sizes[at] and not dims.stays_sharded(v, columns[other]):
        return None
    return Product(eqn, columns, sent, rows, sizes[at])


def of_weight(
    eqn: Equation, values: Sequence[Any], gatherer: Gatherer, scope: Scope
) -> Product | None:
    """Returns an equation as the product of a weight that stays sharded with activations; None if
    it is not such a product, or if the weight is gathered."""
    weights = [i for i, x in enumerate(values) if isinstance(x, Shard)]
    if len(weights) != 1:
        return None
    (at,) = weights
    emitted = scope.emitted
    weight = emitted.as_filled(values[at])
    is_gathered = weight.gathered is not None or emitted.copy_of(weight) is not None
    if is_gathered or weight.gathering.host or weight.gathering.narrow is not None:
        return None
    return find_product(eqn, at, weight.spec, gatherer, scope.row_dims)


def multiplies_shards(gatherer: Gatherer) -> bool:
    """Returns whether weights may stay sharded in products: whether parameters are gathered in each
    pass, over all devices, and not in blocks."""
    over_all = batch_axes(gatherer.mesh) == (gatherer.axis,) and gatherer.sums_own_rows
    in_blocks = gatherer.sent.weights or gatherer.sent.gradients
    return over_all and not gatherer.keep and in_blocks is None


def _divisible(shape: Sequence[int], rows: Sequence[int], gatherer: Gatherer) -> list[int]:
    """Returns the dimensions of rows that split evenly over the devices."""
    return [d for d in rows if shape[d] % axis_size(gatherer.mesh, gatherer.axis) == 0]


def _by_column(x: jax.Array, column: int, gatherer: Gatherer) -> jax.Array:
    return gatherer.constrain(x, _spec(x.ndim, column, gatherer))


def _spec(ndim: int, dimension: int, gatherer: Gatherer) -> Spec:
    return tuple(gatherer.axis if d == dimension else None for d in range(ndim))


def _drop_oldest(all_rows: AllRows, most: int) -> None:
    """Drops the oldest gathered rows, but never the newest, until at most ``most`` bytes are
    kept."""
    kept = {key: (x, copy) for key, (x, copy) in all_rows.items() if copy is not None}
    size = sum(gathered.nbytes for _, gathered in kept.values())
    for key, (x, gathered) in list(kept.items())[:-1]:
        if size <= most:
            break
        size -= gathered.nbytes
        all_rows[key] = x, None
