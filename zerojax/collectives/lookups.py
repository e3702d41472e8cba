"""Lookups of rows in a table that stays sharded.

A lookup reads a few rows of a table, one a token. An all-gather would send the full table to every
device, and store it on each. Instead each device looks up the rows of all tokens in its own shard,
and the rows are sent. If the table's rows are sharded, a device has zeros for a row of
another shard, so that the sum over the devices is the row: XLA partitions a lookup in this way if
the table is constrained to its shard. If the table's columns are sharded, an all-to-all of a
shard's size first reshards it by rows. A table that is also used unsharded (a tied head), and whose
rows the user's spec splits, is looked up by columns: an all-to-all reshards the rows that were
looked up.

Tables that are gathered, because more rows are looked up than they have, are gathered one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import decisions
from zerojax.collectives.gathering import Gatherer, Scope
from zerojax.collectives.narrow import narrowest
from zerojax.collectives.shard import Shard
from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.graph.lookups import Lookup
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation, Value

_TIMES = 2
"""The fewest elements of a table that stays sharded, as a multiple of the elements looked up: the
indices are gathered too, each device masks the rows of all tokens, and if all devices have the same
tokens the sum of their rows is an all-reduce."""


class TableLookup(NamedTuple):
    """A lookup of rows in a sharded table.

    Attributes:
      eqn: The equation, a gather.
      table: The spec of the table while each device looks up rows in its own shard; None if the
        table is gathered, after the tables before it.
      by_columns: Whether the shard has columns of the table, so that the devices then exchange
        columns of the rows that were looked up for rows.
    """

    eqn: Equation
    table: Spec | None
    by_columns: bool = False

    def run(self, values: Sequence[Value], gatherer: Gatherer, scope: Scope) -> jax.Array:
        """Returns the rows."""
        table, *indices = values
        stored = narrowest(table)  # half the bytes
        emitted, dtype = scope.emitted, table.value.dtype
        if self.table is None:
            delayed = table
            if emitted.rows is not None:
                value, _ = lax.optimization_barrier((stored.value, emitted.rows))
                delayed = stored.with_value(value)
            unsharded = gatherer.gather(delayed, scope, indices)
            emitted.gathered[id(stored)] = stored, unsharded
            (emitted.rows,) = jaxprs.bind(self.eqn, [unsharded.astype(dtype), *indices])
            return emitted.rows
        pinned = gatherer.constrain(stored.value, stored.spec)
        if self.by_columns:
            (rows,) = jaxprs.bind(self.eqn, [pinned, *indices])
            # XLA makes an all-to-all of a change from one sharded dimension to another.
            columns = gatherer.constrain(rows, (None, None, gatherer.axis))
            return gatherer.constrain(columns, (gatherer.axis, None, None)).astype(dtype)
        pinned = gatherer.constrain(pinned, self.table)
        out = jax.ShapeDtypeStruct(self.eqn.outvars[0].aval.shape, stored.value.dtype)
        ledger, reason = gatherer.ledger, "each device looks rows up in its own shard"
        sent = [(decisions.GATHER, indices[0]), (decisions.SCATTER, out)]
        if not ledger.by_rows(self.eqn.invars[1]):  # all devices need the same rows
            sent = [(decisions.REDUCE, out)]
        with ledger.place(decisions.USE, reason), ledger.of(stored.spec), ledger.instead(*sent):
            (rows,) = jaxprs.bind(self.eqn, [pinned, *indices])
        return rows.astype(dtype)


def find_lookup(
    eqn: Equation, values: Sequence[Value], gatherer: Gatherer, scope: Scope
) -> TableLookup | None:
    """Returns an equation as a lookup of rows in a sharded table; None if the equation is not a
    lookup, or if the table is gathered in the usual way."""
    table = values[0]
    if eqn.primitive is not prims.gather_p or not isinstance(table, Shard):
        return None
    is_used_unsharded = id(table) in scope.used_unsharded
    serves_all = scope.share and is_used_unsharded
    if gatherer.lanes_on_axis or table.unsharded is not None or serves_all:
        return None
    stored = narrowest(table)
    if (spec := spec_by_rows(eqn, stored.spec, gatherer, scope.row_dims)) is not None:
        return TableLookup(eqn, spec)
    if is_used_unsharded and by_columns(eqn, stored.spec, gatherer, scope.row_dims):
        return TableLookup(eqn, stored.spec, by_columns=True)
    few = table.value.size > _looked_up(eqn, gatherer.mesh, scope.row_dims, 1)
    return TableLookup(eqn, None) if few and not scope.share else None


def spec_by_rows(eqn: Equation, spec: Spec, gatherer: Gatherer, rows: RowDimensions) -> Spec | None:
    """Returns the spec of a table during a lookup by rows, which shards rows.

    None if this moves hardly fewer elements than gathering the table, if the equation does not look
    up rows, or if the table is sharded along two dimensions, or unevenly.

    Args:
      eqn: A gather.
      spec: The spec of the table, its first operand.
      gatherer: Gathers tables.
      rows: The dimensions along which rows of the batch lie.
    """
    mesh, axis = gatherer.mesh, gatherer.axis
    shape, dims = eqn.invars[0].aval.shape, layout.dimensions(spec, axis)
    if len(dims) != 1 or layout.padded_shape(shape, spec, mesh) != shape:
        return None
    picked = Lookup.of(eqn).picked
    (sharded,), size = dims, eqn.invars[0].aval.size
    shards = layout.parts(spec[sharded], mesh)
    moved = _TIMES * _looked_up(eqn, mesh, rows, shards)
    if sharded not in picked:
        candidates = [d for d in picked if spec[d] is None and shape[d] % shards == 0]
        if not candidates:
            return None
        row = max(candidates, key=lambda d: shape[d])
        names = [a for a in layout.axes(spec[sharded]) if layout.full_axis(a) == axis]
        spec, moved = layout.without(spec, axis), moved + size / shards
        for name in names:
            spec = layout.within(spec, row, name)
    return spec if moved < size else None


def by_columns(eqn: Equation, spec: Spec, gatherer: Gatherer, rows: RowDimensions) -> bool:
    """Returns whether each device looks up the rows of all tokens in its own columns of a table
    whose rows the user's spec splits: an all-to-all then reshards the rows, and nothing is added up
    over the axis. False if gathering the device's rows of the table moves fewer elements.

    Args:
      eqn: A gather.
      spec: The spec of the table, its first operand.
      gatherer: Gathers tables.
      rows: The dimensions along which rows of the batch lie.
    """
    mesh, axis = gatherer.mesh, gatherer.axis
    table, ids, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    picked = Lookup.of(eqn).picked
    if (
        (table.ndim, picked, len(ids.shape), out.ndim) != (2, (0,), 3, 3)
        or spec[0] is None
        or axis in layout.axes(spec[0])
        or spec[1] != axis
        or batch_axes(mesh) != (axis,)
        or table.shape[1] % layout.parts(axis, mesh)
        or not divides_tokens(eqn, rows, batch_devices(mesh))
    ):
        return False
    return out.size / batch_devices(mesh) < table.size / layout.parts(spec[0], mesh)


def _looked_up(eqn: Equation, mesh: Mesh, rows: RowDimensions, devices: int) -> float:
    """Returns the number of elements that ``devices`` devices look up together, for their part of
    the tokens [rows, ...]; for all tokens without rows, which are the same on all devices."""
    size, shared = eqn.outvars[0].aval.size, batch_devices(mesh)
    return size * devices / shared if divides_tokens(eqn, rows, shared) else size


def divides_tokens(eqn: Equation, rows: RowDimensions, groups: int) -> bool:
    """Returns whether a lookup is of tokens [rows, ...], whose rows divide among the groups. A
    lookup in a table of positions has no rows."""
    tokens = eqn.invars[1]
    return 0 in rows.dims(tokens) and tokens.aval.shape[0] % groups == 0
