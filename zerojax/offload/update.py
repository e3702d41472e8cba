"""The update of a state that does not fit the device: sub-group by sub-group, through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.compiler import streaming
from zerojax.offload.disk_stream import Reads, write
from zerojax.offload.groups import Group, Lying, Piece, groups
from zerojax.offload.separate import Separated
from zerojax.offload.stream import Programs
from zerojax.plan import Plan


class Update:
    """A function of many arrays that replaces some of them, made a few at a time.

    Args:
      function: of flat arguments; its results are flat, too.
      lying: each argument, and then those arrays that are only written.
      own: for each argument, whether it is one of those of which not all are needed at once.
      target: for each result, the number of the array that it replaces; None where it is one
        that the prelude makes.
      plan: of the state; says what mesh to lower for.
      on_host: compute on the host.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        lying: Sequence[Lying],
        own: Sequence[bool],
        target: Sequence[int],
        plan: Plan,
        on_host: bool = False,
    ) -> None:
        mesh, largest = plan.lowering_mesh, plan.config.sub_group_size
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lying[: len(own)]]
        self.separated = Separated(function, shapes, own)
        self.lying = lying
        self.programs = Programs(self.separated, lying, target, mesh, streaming(plan.mesh), on_host)
        self.groups = groups(self.separated.clusters, lying, mesh, largest)
        self.last = {id(p.cluster): p for group in self.groups for p in group}

    def run(self, arrays: list[Any], scalars: Sequence[Any]) -> None:
        """Replaces what is to be replaced among ``arrays``; those are donated.

        Args:
          arrays: as described by ``lying``. What lies on disk is a
            :class:`zerojax.offload.disk_array.DiskLeaf`.
          scalars: what the prelude made.
        """
        came: list[Any] = []
        reads: Reads | None = None
        for before, group, after in _neighbours(self.groups):
            if before is None or _whole(before):
                came = self._load(group, arrays)
            reads = reads or Reads(self.programs, group, arrays)
            loaded = reads.merged(came)
            # On their way while this sub-group is updated.
            reads = None if after is None else Reads(self.programs, after, arrays)
            coming = () if after is None or _whole(group) or _whole(after) else after
            ids = self.programs.ids(group, coming)
            written, came, going = self.programs.get(group, coming)(
                [arrays[i] for i in ids.written],
                [arrays[i] for i in ids.read],
                loaded,
                _starts(group),
                _starts(coming),
                list(scalars),
            )
            del loaded
            for i, x in zip(ids.written, written, strict=True):
                arrays[i] = x
            write(self.programs, group, going, arrays)
            del going
            for p in group:
                if p.count is None or self.last[id(p.cluster)] is p:
                    self._drop(p, arrays)

    def _drop(self, piece: Piece, arrays: list[Any]) -> None:
        """Lets go of what nobody needs once the last piece of a cluster is through: gradients."""
        kept = self.programs.targets(piece)
        for i in piece.cluster.inputs:
            if i not in kept:
                arrays[i] = None

    def _load(self, group: Group, arrays: list[Any]) -> list[Any]:
        """The first sub-group, or one after a cluster that went through as a whole."""
        ids = self.programs.ids((), group)
        if _whole(group) or not ids.coming:
            return []
        load = self.programs.get((), group)
        return load([], [arrays[i] for i in ids.read], [], _starts(()), _starts(group), [])[1]

    def traced(self) -> Iterator[tuple[str, Any]]:
        """Every program of the update, each once, traced for abstract arguments."""
        seen = set()
        scalars = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.separated.scalars]
        for before, group, after in _neighbours(self.groups):
            coming = () if after is None or _whole(group) or _whole(after) else after
            pairs = [(group, coming)]
            first = before is None or _whole(before)
            if first and not _whole(group) and self.programs.ids((), group).coming:
                pairs.insert(0, ((), group))
            for a, b in pairs:
                program: Any = self.programs.get(a, b)
                if id(program) in seen:
                    continue
                seen.add(id(program))
                ids = self.programs.ids(a, b)
                traced = program.trace(
                    [self._abstract(i) for i in ids.written],
                    [self._abstract(i) for i in ids.read],
                    [self._abstract_piece(i, p) for p in a for i in self.programs.loaded(p)],
                    jax.ShapeDtypeStruct((len(a),), jnp.int32),
                    jax.ShapeDtypeStruct((len(b),), jnp.int32),
                    scalars,
                )
                yield f"update {len(seen)}", traced

    def _abstract(self, i: int) -> Any:
        x = self.lying[i]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.programs.sharding(i))

    def _abstract_piece(self, i: int, piece: Piece) -> Any:
        if piece.count is None:
            return self._abstract(i)
        return jax.ShapeDtypeStruct(
            self.programs.piece_shape(i, piece.count),
            self.lying[i].dtype,
            sharding=self.programs.piece_sharding(i),
        )


def _neighbours(found: Sequence[Group]) -> Iterator[tuple[Group | None, Group, Group | None]]:
    for k, group in enumerate(found):
        yield (
            found[k - 1] if k else None,
            group,
            found[k + 1] if k + 1 < len(found) else None,
        )


def _whole(group: Group) -> bool:
    return any(p.count is None for p in group)


def _starts(group: Group) -> np.ndarray:
    return np.array([p.start for p in group], np.int32)
