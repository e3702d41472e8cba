"""Slices of arrays: boxes of indices, the shards that a process stores, chunks being read."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from zerojax.offload.disk.store import Data

T = TypeVar("T")

Index = tuple[slice, ...]
"""A box: a slice without a step for each dimension."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """Yields the boxes that cover elements ``start:stop`` of a flattened array (C order), in order.

    Each box is contiguous in the flattened array.

    Example:
      >>> [*boxes((2, 3), 1, 6)]
      [(slice(0, 1, None), slice(1, 3, None)), (slice(1, 2, None), slice(0, 3, None))]
    """
    if start == stop:
        return
    if not shape:
        yield ()
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, begin, row))
        first += 1
    if first < last:
        yield (slice(first, last), *full_index(rest))
    yield from ((slice(last, last + 1), *box) for box in boxes(rest, 0, end))


def full_index(shape: Sequence[int]) -> Index:
    """Returns the box of all indices."""
    return tuple(slice(0, n) for n in shape)


def shape_of(box: Index) -> tuple[int, ...]:
    """Returns the number of indices in each dimension."""
    return tuple(s.stop - s.start for s in box)


def meet(one: Index, other: Index) -> Index | None:
    """Returns the intersection of two boxes; None if the intersection is empty."""
    intersection = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(s.start >= s.stop for s in intersection) else intersection


def moved(box: Index, by: Index, sign: int = 1) -> Index:
    """Translates a box from the coordinates of ``by`` to the global array's; reverse for -1."""
    return tuple(
        slice(s.start + sign * b.start, s.stop + sign * b.start)
        for s, b in zip(box, by, strict=True)
    )


def grid(shape: Sequence[int], size: Sequence[int]) -> Iterator[Index]:
    """Yields the boxes of ``size`` that tile an array, in C order; the last ones may be smaller.

    Example:
      >>> [*grid((3,), (2,))]
      [(slice(0, 2, None),), (slice(2, 3, None),)]
    """
    sides = [
        [slice(i, min(i + step, n)) for i in range(0, n, step)]
        for n, step in zip(shape, size, strict=True)
    ]
    return itertools.product(*sides)


class StoredShard(NamedTuple):
    """A distinct shard of an array on devices of this process.

    Attributes:
      box: Indices of the shard in the global array.
      devices: The devices of this process that hold the shard.
      owner: The lowest process that holds the shard.
    """

    box: Index
    devices: tuple[jax.Device, ...]
    owner: int


def stored_shards(sharding: Sharding, shape: tuple[int, ...]) -> tuple[StoredShard, ...]:
    """Returns the distinct shards of this process, in the order of their indices."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        assert index is not None
        # Slices have no hash before Python 3.12.
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    addressable = sharding.addressable_devices
    return tuple(
        StoredShard(tuple(slice(*bound) for bound in bounds), local_devices, owner)
        for bounds in sorted(holders)
        if (local_devices := tuple(d for d in holders[bounds] if d in addressable))
        for owner in [min(int(d.process_index) for d in holders[bounds])]
    )


def results(begin: Iterable[Callable[[], Future[T]]], n: int) -> Iterator[T]:
    """Starts futures and yields their results in order; at most ``n`` run or are in memory."""
    under_way: deque[Future[T]] = deque()
    for start in begin:
        if len(under_way) == n:
            yield under_way.popleft().result()
        under_way.append(start())
    while under_way:
        yield under_way.popleft().result()


def flat_chunk(x: jax.Array, chunk: range) -> Data:
    """Returns a chunk of a flattened shard."""
    (device,) = x.devices()
    if device.platform == "cpu" or x.sharding.memory_kind != device.default_memory().kind:
        return np.asarray(x).reshape(-1)[chunk.start : chunk.stop]
    # Sliced on the accelerator, or the host would have to fetch the complete shard.
    return _slice(x, chunk.start, len(chunk))


# The start is traced, so that all chunks of a size share a program.
@functools.partial(jax.jit, static_argnums=2)
def _slice(x: jax.Array, start: int, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x.reshape(-1), (start,), (size,))
