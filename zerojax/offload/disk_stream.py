"""Sub-groups on their way from the disk to the device, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zerojax.offload.disk.array import DiskLeaf
from zerojax.offload.groups import Group, Piece
from zerojax.offload.stream import Programs


class Reads:
    """What a sub-group needs from the disk, on its way into host memory from the start.

    Args:
      programs: know which of the arrays lie on disk.
      group: the sub-group.
      arrays: all of the update's; those on disk are :class:`DiskLeaf`.
    """

    def __init__(self, programs: Programs, group: Group, arrays: Sequence[Any]) -> None:
        self._programs = programs
        self._wanted = [(p, i) for p in group for i in programs.loaded(p)]
        self._reads = {
            i: [arrays[i].read(k) for k in _pieces(programs, i, arrays[i], p)]
            for p, i in self._wanted
            if programs.on_disk(i)
        }
        self._leaves = {i: arrays[i] for i in self._reads}

    def merged(self, came: Sequence[Any]) -> list[Any]:
        """All that the program takes: what came from host memory, and what came from the disk."""
        host = iter(came)
        return [self._put(i, p) if i in self._reads else next(host) for p, i in self._wanted]

    def _put(self, i: int, piece: Piece) -> jax.Array:
        leaf, parts = self._leaves[i], [read.result() for read in self._reads.pop(i)]
        if piece.count is None:
            shape, sharding = leaf.shape, leaf.sharding
        else:
            shape = self._programs.piece_shape(i, piece.count)
            sharding = self._programs.piece_sharding(i)
        local = sharding.shard_shape(shape)
        return jax.make_array_from_single_device_arrays(
            shape,
            sharding,
            [
                jax.device_put(_joined([part[device] for part in parts]).reshape(local), device)
                for device in parts[0]
            ],
        )


def write(programs: Programs, group: Group, going: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Sends what a program has made for the disk there, in the background.

    Waits only where as much as the disk's buffers hold is on its way already.
    """
    left = iter(going)
    for p in group:
        for i in programs.targets(p):
            if not programs.on_disk(i):
                continue
            leaf, made = arrays[i], next(left)
            if p.count is None:
                leaf.fill(made)
            else:
                (k,) = _pieces(programs, i, leaf, p)
                leaf.write(k, made)


def _pieces(programs: Programs, i: int, leaf: DiskLeaf, piece: Piece) -> list[int]:
    """Which of a leaf's pieces on disk a piece of the update is."""
    if piece.count is None:
        return list(range(len(leaf.cuts)))
    return [[start for start, _ in leaf.cuts].index(piece.start * programs.row_size(i))]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
