"""The programs that take sub-groups through the device.

One program does three things at a time: it brings the next sub-group in from host memory, updates
the one that is there, and sends that one's results back. XLA copies on streams of their own, so
the first and the last overlap; what is in device memory at a time is three halves of a sub-group
(:mod:`zerojax.offload.groups`), whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.collectives.host import fetched, sent
from zerojax.collectives.order import impossible
from zerojax.offload.groups import ArrayPlacement, Group, Piece, goes_whole
from zerojax.offload.separate import Separated
from zerojax.plan.places import DISK, HOST, PINNED
from zerojax.xla.compat import computed_on_host
from zerojax.xla.lowered import LOADED, READ, WRITTEN, named

_ARGUMENTS = WRITTEN, READ, LOADED, "starts", "next_starts", "scalars"


class GroupArrays(NamedTuple):
    """Numbers of the arrays that one program takes, each in the order of its use.

    Attributes:
      written: replaced by the update, and donated.
      read: only read.
      loaded: those of the current group that came in before, piece by piece.
      coming: the same of the next group, those that this program brings in.
      going: those of the current group that lie on disk, whose results are returned.
    """

    written: tuple[int, ...]
    read: tuple[int, ...]
    loaded: tuple[int, ...]
    coming: tuple[int, ...]
    going: tuple[int, ...]


class Programs:
    """Makes and keeps the programs of one update.

    Args:
      separated: the update.
      lying: each array, arguments of the update first, then further results.
      target: for each result of the update, the array that it replaces.
      mesh: to lower for.
      options: for the compiler.
      on_host: compute the update on the host.
    """

    def __init__(
        self,
        separated: Separated,
        lying: Sequence[ArrayPlacement],
        target: Sequence[int],
        mesh: Any,
        options: Any = None,
        on_host: bool = False,
    ) -> None:
        self._options = options
        self._separated, self._lying, self._target = separated, lying, target
        self._mesh, self._on_host = mesh, on_host
        self._made: dict[Any, Callable[..., Any]] = {}

    def ids(self, group: Group, coming: Group) -> GroupArrays:
        """The arrays that take part when ``group`` is updated and ``coming`` brought in."""
        outputs = [i for p in group for i in self.targets(p)]
        written = tuple(i for i in outputs if self._lying[i].place != DISK)
        here = [
            i
            for p in group
            for i in p.cluster.inputs
            if not self.on_disk(i) and (p.count is None or not self._streams(i))
        ]
        nexts = tuple(i for p in coming for i in self.streamed(p) if self._is(i, HOST))
        read = dict.fromkeys(i for i in (*here, *nexts) if i not in written)
        return GroupArrays(
            written=written,
            read=tuple(read),
            loaded=tuple(i for p in group for i in self.loaded(p)),
            coming=nexts,
            going=tuple(i for i in outputs if self._lying[i].place == DISK),
        )

    def _is(self, i: int, place: str) -> bool:
        return self._lying[i].place == place

    def _streams(self, i: int) -> bool:
        """Comes in ahead of the update that needs it."""
        return self._is(i, DISK) or (self._is(i, HOST) and not self._on_host)

    def on_disk(self, i: int) -> bool:
        """Whether an array lies on disk."""
        return self._is(i, DISK)

    def loaded(self, piece: Piece) -> list[int]:
        """The arrays of a piece that are there before its program runs."""
        if piece.count is None:
            return [i for i in piece.cluster.inputs if self.on_disk(i)]
        return self.streamed(piece)

    def targets(self, piece: Piece) -> list[int]:
        """The arrays that a piece's results replace."""
        return [self._target[o] for o in piece.cluster.outputs]

    def streamed(self, piece: Piece) -> list[int]:
        """The arrays of a piece that come in ahead of the update."""
        return [] if piece.count is None else [i for i in piece.cluster.inputs if self._streams(i)]

    def get(self, group: Group, coming: Group) -> Callable[..., Any]:
        """``program(written, read, loaded, starts, next_starts, scalars) ->
        (written, coming, going)``, each a list in the order of :meth:`ids`."""
        key = self._signature(group), self._signature(coming), self._shared(group, coming)
        if key not in self._made:
            made = self._whole(group[0]) if goes_whole(group) else self._advance(group, coming)
            self._made[key] = made
        return self._made[key]

    def _signature(self, group: Group) -> Any:
        return tuple(
            (
                p.cluster.key,
                p.count,
                tuple(self._lying[i] for i in p.cluster.inputs),
                tuple(self._lying[i] for i in self.targets(p)),
            )
            for p in group
        )

    def _shared(self, group: Group, coming: Group) -> Any:
        """Which arrays of the one group are which of the other."""
        ids = self.ids(group, coming)
        return tuple(ids.written.index(i) if i in ids.written else -1 for i in ids.coming), tuple(
            ids.read.index(i) if i in ids.read else -1 for i in ids.coming
        )

    def sharding(self, i: int) -> NamedSharding:
        """Where an array lies."""
        lying = self._lying[i]
        kind = PINNED if lying.place == HOST else None
        return NamedSharding(self._mesh, lying.spec, memory_kind=kind)

    def row_size(self, i: int) -> int:
        """Elements of a row of an array, on each device."""
        return math.prod(self._lying[i].rows(self._mesh)[1:])

    def piece_spec(self, i: int) -> PartitionSpec:
        """How a piece of an array lies: every device's rows under one another."""
        axes = self._lying[i].axes()
        return PartitionSpec(axes) if axes else PartitionSpec()

    def piece_sharding(self, i: int) -> NamedSharding:
        """The same as a sharding on the device."""
        return NamedSharding(self._mesh, self.piece_spec(i))

    def piece_shape(self, i: int, count: int) -> tuple[int, ...]:
        """The shape of the piece of an array, over all devices."""
        devices = 1
        for a in self._lying[i].axes():
            devices *= self._mesh.shape[a]
        return (count * devices, *self._lying[i].rows(self._mesh)[1:])

    def _advance(self, group: Group, coming: Group) -> Callable[..., Any]:
        ids, mesh = self.ids(group, coming), self._mesh

        def local(
            written: list[Any],
            read: list[Any],
            loaded: list[Any],
            starts: Any,
            next_starts: Any,
            scalars: list[Any],
        ) -> tuple[list[Any], list[Any], list[Any]]:
            arrays = {
                i: x.reshape(self._lying[i].rows(mesh))
                for i, x in zip((*ids.written, *ids.read), (*written, *read), strict=True)
            }
            came = {
                i: fetched(_rows(arrays[i], next_starts[k], p.count))
                for k, p in enumerate(coming)
                for i in self.streamed(p)
                if self._is(i, HOST)
            }
            ready = dict(zip(ids.loaded, loaded, strict=True))
            gone = {}
            for k, p in enumerate(group):
                values = [
                    ready[i] if i in ready else self._here(_rows(arrays[i], starts[k], p.count))
                    for i in p.cluster.inputs
                ]
                for i, new in zip(self.targets(p), self._run(p, values, scalars), strict=True):
                    if self._is(i, DISK):
                        gone[i] = new
                        continue
                    # Not before the next rows are out: else XLA copies the array to keep both.
                    at = starts[k] + (_after(came[i]) if i in came else 0)
                    new = sent(new) if self._is(i, HOST) else fetched(new)
                    arrays[i] = lax.dynamic_update_slice_in_dim(arrays[i], new, at, 0)
            return (
                [arrays[i].reshape(x.shape) for i, x in zip(ids.written, written, strict=True)],
                [came[i] for i in ids.coming],
                [gone[i] for i in ids.going],
            )

        def specs(numbers: Sequence[int]) -> list[PartitionSpec]:
            return [self._lying[i].spec for i in numbers]

        def pieces(numbers: Sequence[int]) -> list[PartitionSpec]:
            return [self.piece_spec(i) for i in numbers]

        none = PartitionSpec()
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs(ids.written), specs(ids.read), pieces(ids.loaded), none, none, none),
            out_specs=(specs(ids.written), pieces(ids.coming), pieces(ids.going)),
            check_vma=False,
        )
        return jax.jit(
            named(mapped, *_ARGUMENTS),
            donate_argnums=(0,),
            compiler_options=self._options,
            out_shardings=(
                [self.sharding(i) for i in ids.written],
                [self.piece_sharding(i) for i in ids.coming],
                [self.piece_sharding(i) for i in ids.going],
            ),
        )

    def _here(self, x: Any) -> Any:
        return sent(x) if self._on_host else x

    def _run(self, p: Piece, values: list[Any], scalars: list[Any]) -> list[Any]:
        c = p.cluster
        run = lambda v, s: self._separated.run(c.outputs, c.inputs, v, s, v[0].shape)  # noqa: E731
        if not self._on_host:
            return run(values, scalars)
        return computed_on_host(run)(values, [sent(s) for s in scalars])

    def _whole(self, p: Piece) -> Callable[..., Any]:
        ids, c = self.ids((p,), ()), p.cluster
        targets = self.targets(p)

        def run(
            written: list[Any], read: list[Any], loaded: Any, a: Any, b: Any, scalars: list[Any]
        ) -> tuple[list[Any], list[Any], list[Any]]:
            numbers = (*ids.written, *ids.read, *ids.loaded)
            arrays = dict(zip(numbers, (*written, *read, *loaded), strict=True))
            values = [fetched(arrays[i]) for i in c.inputs]
            news = self._separated.run(c.outputs, c.inputs, values, scalars)
            found = dict(zip(targets, news, strict=True))
            return [found[i] for i in ids.written], [], [found[i] for i in ids.going]

        return jax.jit(
            named(run, *_ARGUMENTS),
            donate_argnums=(0,),
            compiler_options=self._options,
            out_shardings=(
                [self.sharding(i) for i in ids.written],
                [],
                [self.sharding(i) for i in ids.going],
            ),
        )


def _rows(x: Any, start: Any, count: int | None) -> Any:
    return lax.dynamic_slice_in_dim(x, start, count or x.shape[0], 0)


def _after(came: Any) -> Any:
    """0, once ``came`` is there."""
    return impossible(came[(0,) * came.ndim]).astype(jnp.int32)
