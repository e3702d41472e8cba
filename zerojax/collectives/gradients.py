"""Equations that compute gradients, and the reduction of each gradient to its shard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as prims

from zerojax.collectives import decisions, partial_sums, reduction
from zerojax.collectives.gathering import Gatherer, is_sharded
from zerojax.collectives.partial_sums import row_sum_of
from zerojax.collectives.reduction import add_up, is_quantized
from zerojax.collectives.uneven import bind_padded
from zerojax.devices.mesh import REPLICA
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def bind_summed(
    eqn: Equation,
    values: Sequence[jax.Array],
    specs: Sequence[Spec | None],
    gatherer: Gatherer,
    rows: RowDimensions,
) -> list[jax.Array]:
    """Runs an equation, and reduces the results that are gradients over the devices to ``specs``.

    ``rows`` are the dimensions along which rows of the batch lie.
    """
    if gatherer.sent.gradients is not None and len(specs) == 1 and specs[0] is not None:
        result = _bind_quantized(eqn, values, specs[0], gatherer, rows)
        if result is not None:
            return [result]
    scatter = gatherer.scatter
    if eqn.primitive is prims.scatter_add_p:
        # The gradient of a lookup of fewer rows than the table has: gathering the rows moves less.
        scatter = gatherer.scatter_parts if _few_rows(eqn) else gatherer.scatter_table
    if len(specs) == 1 and (spec := specs[0]) is not None:
        groups, shape = gatherer.replicas, eqn.outvars[0].aval.shape
        if groups > 1 and is_sharded(spec, gatherer.axis) and can_split(eqn, rows, groups):
            parts, table, unsharded = by_group(eqn, values, groups), values[0], (None,) * len(spec)
            group_size = gatherer.mesh.size // groups
            with gatherer.ledger.reduces(table, unsharded, spec, over=group_size, partly=True):
                parts = gatherer.constrain(parts, (REPLICA, *spec))
            with gatherer.ledger.reduces(table, spec, spec, over=groups):
                return [table + add_up(parts, 0)]
        even_shape = layout.padded_shape(shape, spec, gatherer.mesh)
        padded = bind_padded(eqn, values, even_shape) if even_shape != shape else None
        if padded is not None:
            unpadded = scatter(padded, spec)[tuple(map(slice, shape))]
            return [gatherer.constrain(unpadded, spec)]
    with _sent_instead(eqn, values, specs, gatherer):
        outs = jaxprs.bind(eqn, values)
        return [o if s is None else scatter(o, s) for o, s in zip(outs, specs, strict=True)]


def _sent_instead(
    eqn: Equation, values: Sequence[jax.Array], specs: Sequence[Spec | None], gatherer: Gatherer
) -> contextlib.ExitStack[bool | None]:
    """Records the collectives that XLA emits for an equation instead of a reduce-scatter of its
    result; returns their contexts."""
    ledger, spec = gatherer.ledger, specs[0] if len(specs) == 1 else None
    stack = contextlib.ExitStack()
    if not ledger.asked or spec is None or not is_sharded(spec, gatherer.axis):
        return stack
    if eqn.primitive is prims.scatter_add_p and _few_rows(eqn):
        _, indices, rows = values
        row_dims = jaxprs.param(eqn, "dimension_numbers").inserted_window_dims
        to_rows = any(d in row_dims for d in layout.dimensions(spec, gatherer.axis))
        stack.enter_context(
            ledger.place(decisions.PRODUCED, "fewer rows than the table's are sent")
        )
        leading = [-(-n // gatherer.mesh.size) for n in rows.shape[:1]]  # none of a single element
        own_rows = jax.ShapeDtypeStruct((*leading, *rows.shape[1:]), rows.dtype)
        sent = (decisions.GATHER, rows) if to_rows else (decisions.EXCHANGE, own_rows)
        stack.enter_context(ledger.instead((decisions.GATHER, indices), sent))
    elif eqn.primitive is prims.reduce_sum_p and len(layout.parts_of(spec, gatherer.axis)) > 1:
        stack.enter_context(ledger.place(decisions.PRODUCED, "the sum is all-reduced, then split"))
        stack.enter_context(ledger.instead((decisions.REDUCE, eqn.outvars[0].aval)))
    return stack


def _bind_quantized(
    eqn: Equation, values: Sequence[jax.Array], spec: Spec, gatherer: Gatherer, rows: RowDimensions
) -> jax.Array | None:
    """Returns the result of an equation, summed over the devices in quantized form; None if the
    device's partial sums are unknown, or are not sent quantized."""
    shape, devices = eqn.outvars[0].aval.shape, gatherer.mesh.size
    if not is_quantized(shape, spec, gatherer):
        return None
    if (row_sum := row_sum_of(eqn, rows, spec, gatherer)) is not None:
        return partial_sums.total(row_sum.partial(values, gatherer), gatherer)
    if eqn.primitive is prims.scatter_add_p and _few_rows(eqn):
        return None  # sending the rows moves fewer bytes
    if gatherer.sums_own_rows and can_split(eqn, rows, devices):
        return values[0] + reduction.of_all(by_group(eqn, values, devices), spec, gatherer)
    gatherer.sent_unquantized.append((eqn.primitive.name, shape))
    return None


def at_one_index(eqn: Equation) -> bool:
    """Returns whether an equation is a scatter at one index, or a jitted function that contains
    one.

    The array that it changes needs a barrier. Otherwise XLA merges the slice that shards a gradient
    with the slice of its one row, without clamping: on CPU devices without that row another row is
    wrong, and GPUs all-reduce the full gradient.
    """
    return contains(eqn, _scatters_once, enters=_is_jitted)


def _scatters_once(eqn: Equation) -> bool:
    scatters = eqn.primitive.name.startswith("scatter")
    return scatters and math.prod(eqn.invars[1].aval.shape[:-1]) == 1


def _is_jitted(eqn: Equation) -> bool:
    return eqn.primitive is prims.jit_p


def _few_rows(eqn: Equation) -> bool:
    table, _, rows = eqn.invars
    return rows.aval.size <= table.aval.size


def can_split(eqn: Equation, rows: RowDimensions, groups: int) -> bool:
    """Returns whether an equation is the gradient of a lookup for tokens [rows, ...], whose rows
    divide among the groups. A lookup in a table of positions has no rows."""
    if eqn.primitive is not prims.scatter_add_p:
        return False
    indices = eqn.invars[1].aval
    batching = jaxprs.param(eqn, "dimension_numbers").operand_batching_dims
    return not batching and 0 in rows.dims(eqn.invars[1]) and indices.shape[0] % groups == 0


def by_group(eqn: Equation, values: Sequence[jax.Array], groups: int) -> jax.Array:
    """Returns the sum that each of ``groups`` adds to a table: [groups, *table].

    XLA's partitioner sums a scatter over all devices at once, but a product within each group
    first.
    """
    table, indices, updates = values
    numbers = jaxprs.param(eqn, "dimension_numbers")
    row = next(d for d in range(updates.ndim) if d not in numbers.update_window_dims)

    def split(x: jax.Array, d: int) -> jax.Array:
        return x.reshape(*x.shape[:d], groups, x.shape[d] // groups, *x.shape[d + 1 :])

    def added(indices: jax.Array, updates: jax.Array) -> jax.Array:
        return jaxprs.bind(eqn, [jnp.zeros_like(table), indices, updates])[0]

    return jax.vmap(added, in_axes=(0, row))(split(indices, 0), split(updates, row))
