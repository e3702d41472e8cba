"""Gradients computed with padding, so that uneven shards can be reduce-scattered.

XLA reduce-scatters only into equal shards. A gradient that is first summed and then padded is
all-reduced in full, so the operands of the sum are padded instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.plan.stored import pad
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def bind_padded(
    eqn: Equation, values: Sequence[jax.Array], shape: Sequence[int]
) -> jax.Array | None:
    """Returns the result of an equation, padded to ``shape``; None for an equation without a
    rule."""
    rule = _RULES.get(eqn.primitive)
    operands = None if rule is None else rule(eqn, values, shape)
    return None if operands is None else jaxprs.bind(eqn, operands)[0]


def _product(eqn: Equation, values: Sequence[jax.Array], shape: Sequence[int]) -> list[jax.Array]:
    """Pads a product's operands: the result has the batch dimensions first, then the free ones of
    each side."""
    (left, right), batch = jaxprs.param(eqn, "dimension_numbers")
    contracted, sizes = (left, right), list(shape)
    batch_sizes = [sizes.pop(0) for _ in batch[0]]
    operands = []
    for x, over, along in zip(values, contracted, batch, strict=True):
        padded_shape = list(x.shape)
        for d, size in zip(along, batch_sizes, strict=True):
            padded_shape[d] = size
        for d in range(x.ndim):
            if d not in over and d not in along:
                padded_shape[d] = sizes.pop(0)
        operands.append(pad(x, padded_shape))
    return operands


def _sum(eqn: Equation, values: Sequence[jax.Array], shape: Sequence[int]) -> list[jax.Array]:
    (x,), sizes = values, list(shape)
    axes = jaxprs.param(eqn, "axes")
    return [pad(x, [n if d in axes else sizes.pop(0) for d, n in enumerate(x.shape)])]


def _lookup(
    eqn: Equation, values: Sequence[jax.Array], shape: Sequence[int]
) -> list[jax.Array] | None:
    """Pads the operands of an equation that adds windows of rows to a table. None if padding could
    receive a window that the unpadded table drops or moves, or if a batch of tables would be
    padded, as each has its own indices."""
    if jaxprs.param(eqn, "mode") == lax.GatherScatterMode.CLIP:
        return None
    table, indices, rows = values
    numbers = jaxprs.param(eqn, "dimension_numbers")
    rowwise = {*numbers.inserted_window_dims}  # an index beyond the table then adds to padding
    columns = [d for d in range(table.ndim) if d not in {*rowwise, *numbers.operand_batching_dims}]
    padded_shape = list(rows.shape)
    for d, at in zip(columns, numbers.update_window_dims, strict=True):
        if rows.shape[at] == table.shape[d]:
            padded_shape[at] = shape[d]
            rowwise.add(d)
    if any(shape[d] != table.shape[d] for d in range(table.ndim) if d not in rowwise):
        return None
    return [pad(table, shape), indices, pad(rows, padded_shape)]


_RULES = {prims.dot_general_p: _product, prims.reduce_sum_p: _sum, prims.scatter_add_p: _lookup}
