"""Gathers and scatters for ``tests/exact.py``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

Array = np.ndarray
DROPS = lax.GatherScatterMode.FILL_OR_DROP


def gather(p: Any, operand: Array, indices: Array) -> tuple[Array, Array]:
    """The windows, and a mask of elements outside the operand, to be filled."""
    numbers = p["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    at, inside = _windows(
        operand.shape, indices, numbers.start_index_map, [*batching], p["slice_sizes"], gone, p
    )
    picked = operand[at]
    outside = np.broadcast_to(~inside, picked.shape)
    back = _back(picked.ndim, numbers.offset_dims)
    return picked.transpose(back), outside.transpose(back)


def scatter(p: Any, operand: Array, indices: Array, updates: Array, *, add: bool) -> Array:
    """The operand after windows are added to it or replace its elements."""
    numbers = p["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(updates.shape[d] for d in numbers.update_window_dims)
    window = [1 if d in gone else next(sizes) for d in range(operand.ndim)]
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    at, inside = _windows(
        operand.shape, indices, numbers.scatter_dims_to_operand_dims, [*batching], window, gone, p
    )
    order = np.argsort(_back(updates.ndim, numbers.update_window_dims))
    at = tuple(np.broadcast_arrays(*at))
    updates, inside = updates.transpose(order), np.broadcast_to(inside, at[0].shape)
    kept = tuple(i[inside] for i in at)
    out = operand.copy()
    if add:
        np.add.at(out, kept, updates[inside])
    else:
        out[kept] = updates[inside]
    return out


def _windows(
    shape: Sequence[int],
    indices: Array,
    dimensions: Sequence[int],
    batching: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    gone: set[int],
    p: Any,
) -> tuple[tuple[Array, ...], Array]:
    """Per dimension the indices of all windows, [*batch, *window]; and a mask of those inside."""
    batch = indices.shape[:-1]
    window = [n for d, n in enumerate(sizes) if d not in gone]
    lead, inside, kept = (*batch, *(1 for _ in window)), np.ones(batch, bool), 0
    found = []
    for d, (n, size) in enumerate(zip(shape, sizes, strict=True)):
        start = np.zeros(batch, np.int64)
        if d in dimensions:
            start = indices[..., list(dimensions).index(d)].astype(np.int64)
            inside &= (start >= 0) & (start <= n - size)
            start = np.clip(start, 0, n - size)
        for own, dimension in batching:
            if own == d:
                along = [-1 if i == dimension else 1 for i in range(len(batch))]
                start = np.broadcast_to(np.arange(n).reshape(along), batch)
        at = start.reshape(lead)
        if d not in gone:
            along = [-1 if i == kept else 1 for i in range(len(window))]
            at, kept = at + np.arange(size).reshape(along), kept + 1
        found.append(at)
    drops = p["mode"] == DROPS
    return tuple(found), inside.reshape(lead) if drops else np.ones(lead, bool)


def _back(ndim: int, offsets: Sequence[int]) -> list[int]:
    """The permutation that moves the window of [*batch, *window] to the dimensions ``offsets``."""
    batch, window = iter(range(ndim - len(offsets))), iter(range(ndim - len(offsets), ndim))
    return [next(window) if d in offsets else next(batch) for d in range(ndim)]
