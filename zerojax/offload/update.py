"""The update of a state that does not fit the device: sub-group by sub-group, through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.offload.disk_stream import Reads, write
from zerojax.offload.groups import ArrayPlacement, Group, Piece, goes_whole, groups
from zerojax.offload.separate import Separated
from zerojax.offload.stream import Programs
from zerojax.plan.plan import Plan
from zerojax.xla.compiler import streaming


class Call:
    """A program, and which arrays it takes: updates one sub-group and brings the next one in."""

    def __init__(self, programs: Programs, group: Group, coming: Group) -> None:
        self.group, self.coming = group, coming
        self.ids, self.program = programs.ids(group, coming), programs.get(group, coming)
        self._starts = _starts(group), _starts(coming)

    def __call__(
        self, arrays: Sequence[Any], loaded: Sequence[Any], scalars: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """What is written, what came in and what goes to the disk."""
        written = [arrays[i] for i in self.ids.written]
        read = [arrays[i] for i in self.ids.read]
        return self.program(written, read, loaded, *self._starts, list(scalars))


class Turn(NamedTuple):
    """One sub-group's turn.

    Attributes:
      load: brings it in from host memory, where the turn before did not.
      update: updates it, and brings the next one in.
      after: the next one.
      done: arrays that nobody needs after it.
    """

    load: Call | None
    update: Call
    after: Group
    done: tuple[int, ...]


class Update:
    """A function of many arrays that replaces some of them, made a few at a time.

    Args:
      function: of flat arguments; its results are flat, too.
      lying: each argument, and then those arrays that are only written.
      own: for each argument, whether it is one of those of which not all are needed at once.
      target: for each result, the number of the array that it replaces.
      plan: of the state; says what mesh to lower for.
      on_host: compute on the host.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        lying: Sequence[ArrayPlacement],
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
        self.turns = [*self._turns(groups(self.separated.clusters, lying, mesh, largest))]

    def _turns(self, found: Sequence[Group]) -> Iterator[Turn]:
        last = {id(p.cluster): p for group in found for p in group}
        came = False  # with the turn before
        for group, after in zip(found, [*found, ()][1:], strict=True):
            load = None if came or goes_whole(group) else Call(self.programs, (), group)
            came = not (goes_whole(group) or goes_whole(after))
            done = [
                i
                for p in group
                if last[id(p.cluster)] is p
                for i in {*p.cluster.inputs}.difference(self.programs.targets(p))
            ]
            yield Turn(
                load if load and load.ids.coming else None,
                Call(self.programs, group, after if came else ()),
                after,
                tuple(done),
            )

    def run(self, arrays: list[Any], scalars: Sequence[Any]) -> None:
        """Replaces what is to be replaced among ``arrays``; those are donated.

        Args:
          arrays: as described by ``lying``. What lies on disk is a
            :class:`zerojax.offload.disk.array.DiskLeaf`.
          scalars: what the prelude made.
        """
        came: list[Any] = []
        reads: Reads | None = None
        for turn in self.turns:
            group, ids = turn.update.group, turn.update.ids
            if turn.load:
                came = turn.load(arrays, [], [])[1]
            reads = reads or Reads(self.programs, group, arrays)
            loaded = reads.merged(came)
            # On their way while this sub-group is updated.
            reads = Reads(self.programs, turn.after, arrays)
            written, came, going = turn.update(arrays, loaded, scalars)
            del loaded
            for i, x in zip(ids.written, written, strict=True):
                arrays[i] = x
            write(self.programs, group, going, arrays)
            del going
            for i in turn.done:  # gradients
                arrays[i] = None

    def traced(self) -> Iterator[tuple[str, Any, int]]:
        """Every program of the update, each once, traced for abstract arguments; and how often
        it runs."""
        calls = [call for turn in self.turns for call in (turn.load, turn.update) if call]
        scalars = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.separated.scalars]
        each: dict[int, list[Call]] = {}
        for call in calls:
            each.setdefault(id(call.program), []).append(call)
        for number, same in enumerate(each.values(), 1):
            call = same[0]
            program: Any = call.program
            traced = program.trace(
                [self._abstract(i) for i in call.ids.written],
                [self._abstract(i) for i in call.ids.read],
                [self._abstract_piece(i, p) for p in call.group for i in self.programs.loaded(p)],
                jax.ShapeDtypeStruct((len(call.group),), jnp.int32),
                jax.ShapeDtypeStruct((len(call.coming),), jnp.int32),
                scalars,
            )
            yield f"update {number}", traced, len(same)

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


def _starts(group: Group) -> np.ndarray:
    return np.array([p.start for p in group], np.int32)
