"""Update of a state that does not fit the device: it streams through by sub-groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.collectives.gathering import Gatherer, Thresholds
from zerojax.offload.disk.array import DiskLeaf
from zerojax.offload.groups import ArrayPlacement, Group, GroupRows, groups, is_sent_unsplit
from zerojax.offload.separate import SeparatedUpdate
from zerojax.offload.stream import GroupArrays, GroupPrograms, GroupResults
from zerojax.plan.state_sharding import Plan
from zerojax.xla.compiler import streaming


class GroupUpdate:
    """A program that updates one sub-group and brings the next one in, with its arrays.

    Args:
      programs: Builds the program.
      group: The sub-group to update; empty if the program only brings ``coming`` in.
      coming: The next sub-group; empty if the program brings none in.
    """

    group: Group
    coming: Group
    numbers: GroupArrays
    program: Callable[..., GroupResults]

    def __init__(self, programs: GroupPrograms, group: Group, coming: Group) -> None:
        self.group, self.coming = group, coming
        self.numbers, self.program = programs.numbers(group, coming), programs.get(group, coming)
        self._starts = _starts(group), _starts(coming)

    def __call__(
        self, arrays: Sequence[object], loaded: Sequence[object], scalars: Sequence[object]
    ) -> GroupResults:
        """Runs the program; ``loaded`` was brought in before, ``scalars`` are the prelude's."""
        written = [arrays[i] for i in self.numbers.written]
        read = [arrays[i] for i in self.numbers.read]
        return self.program(written, read, loaded, *self._starts, list(scalars))


class Turn(NamedTuple):
    """One sub-group's turn.

    Attributes:
      load: Program that brings the sub-group in from host memory; None if the previous turn did, or
        if nothing is to be brought in.
      update: Program that updates the sub-group, and brings the next one in.
      after: The next sub-group.
      done: Indices of the arrays that no later turn needs.
    """

    load: GroupUpdate | None
    update: GroupUpdate
    after: Group
    done: tuple[int, ...]


class TracedUpdate(NamedTuple):
    """A program of the update, traced for abstract arguments, with its number of runs."""

    name: str
    traced: jax.stages.Traced
    times: int


class Update:
    """A function that replaces some of many arrays, run for a few arrays at a time.

    Args:
      function: A function of flat arguments, with flat results.
      placements: The placement of each argument, and then of the arrays that are only written.
      own: For each argument, whether it is one of the many that are not all needed at once.
      target: For each result, the index of the array that it replaces.
      plan: PartitionSpec and bytes of every leaf; names the mesh to lower for.
    """

    separated: SeparatedUpdate
    programs: GroupPrograms
    turns: list[Turn]

    def __init__(
        self,
        function: Callable[..., Sequence[jax.Array]],
        placements: Sequence[ArrayPlacement],
        own: Sequence[bool],
        target: Sequence[int],
        plan: Plan,
    ) -> None:
        mesh, largest = plan.lowering_mesh, plan.config.sub_group_size
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in placements[: len(own)]]
        self.separated = SeparatedUpdate(function, shapes, own)
        gatherer = Gatherer(
            mesh, plan.axis, keep=False, thresholds=Thresholds(small=plan.config.small_array_size)
        )
        self.programs = GroupPrograms(
            self.separated, placements, target, gatherer, streaming(plan.mesh)
        )
        self.turns = [*self._turns(groups(self.separated.clusters, placements, mesh, largest))]

    def _turns(self, groups: Sequence[Group]) -> Iterator[Turn]:
        """Yields the turn of each group. A turn brings the next group in, unless one of the two
        passes through the device unsplit."""
        last = {id(p.cluster): p for group in groups for p in group}
        is_loaded = False  # whether the previous turn brings the group in
        for group, after in zip(groups, [*groups, ()][1:], strict=True):
            load = (
                None
                if is_loaded or is_sent_unsplit(group)
                else GroupUpdate(self.programs, (), group)
            )
            is_loaded = not (is_sent_unsplit(group) or is_sent_unsplit(after))
            done = [
                i
                for p in group
                if last[id(p.cluster)] is p
                for i in {*p.cluster.inputs}.difference(self.programs.targets(p))
            ]
            yield Turn(
                load if load and load.numbers.coming else None,
                GroupUpdate(self.programs, group, after if is_loaded else ()),
                after,
                tuple(done),
            )

    def run(self, arrays: list[Any], scalars: Sequence[object]) -> None:
        """Replaces the targets in the list ``arrays``; replaced arrays are donated.

        Args:
          arrays: The arrays that ``placements`` describes; arrays on disk as
            :class:`zerojax.offload.disk.array.DiskLeaf`.
          scalars: The prelude's scalars.

        Raises:
          DiskStateError: bytes on the disk are not those that were written.
        """
        host_arrays: list[jax.Array] = []
        reads: _Reads | None = None
        # A program for each group: one program would bring all moments to the device at once,
        # whatever barriers it has, and save 6% of the memory (2,207 MB for 2,341).
        for turn in self.turns:
            group, numbers = turn.update.group, turn.update.numbers
            if turn.load:
                host_arrays = turn.load(arrays, [], []).coming
            reads = reads or _Reads(self.programs, group, arrays)
            loaded = reads.merged(host_arrays)
            # The next sub-group is read during the update.
            reads = _Reads(self.programs, turn.after, arrays)
            written, host_arrays, disk_results = turn.update(arrays, loaded, scalars)
            # A name that is left would keep this half on the device during the next turn.
            del loaded
            for i, x in zip(numbers.written, written, strict=True):
                arrays[i] = x
            _write(self.programs, group, disk_results, arrays)
            del disk_results
            for i in turn.done:  # gradients
                arrays[i] = None

    def traced(self) -> Iterator[TracedUpdate]:
        """Traces every program of the update, each once."""
        calls = [call for turn in self.turns for call in (turn.load, turn.update) if call]
        scalars = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.separated.scalars]
        by_program: dict[int, list[GroupUpdate]] = {}
        for call in calls:
            by_program.setdefault(id(call.program), []).append(call)
        for number, program_calls in enumerate(by_program.values(), 1):
            call = program_calls[0]
            program: Any = call.program
            traced = program.trace(
                [*map(self.programs.abstract, call.numbers.written)],
                [*map(self.programs.abstract, call.numbers.read)],
                [
                    self.programs.abstract(i, p.rows)
                    for p in call.group
                    for i in self.programs.loaded(p)
                ],
                jax.ShapeDtypeStruct((len(call.group),), jnp.int32),
                jax.ShapeDtypeStruct((len(call.coming),), jnp.int32),
                scalars,
            )
            yield TracedUpdate(f"update {number}", traced, len(program_calls))


class _Reads:
    """Reads under way that bring a sub-group's arrays from the disk into host memory.

    Args:
      programs: Programs of the update, which know which arrays are stored on disk.
      group: The sub-group.
      arrays: Arrays of the update.
    """

    def __init__(self, programs: GroupPrograms, group: Group, arrays: Sequence[Any]) -> None:
        self._programs = programs
        self._wanted = [(p, i) for p in group for i in programs.loaded(p)]
        self._leaves: dict[int, DiskLeaf] = {
            i: arrays[i] for _, i in self._wanted if programs.on_disk(i)
        }
        self._reads = {
            i: [
                [leaf.read_shard(n, k) for k in _chunk_indices(programs, i, leaf, p)]
                for n in range(len(leaf.shards))
            ]
            for p, i in self._wanted
            if (leaf := self._leaves.get(i)) is not None
        }

    def merged(self, came: Sequence[jax.Array]) -> list[jax.Array]:
        """Merges ``came``, from host memory, with the arrays from disk in the program's order."""
        host = iter(came)
        return [self._put(i, p) if i in self._reads else next(host) for p, i in self._wanted]

    def _put(self, i: int, part: GroupRows) -> jax.Array:
        leaf, reads = self._leaves[i], self._reads.pop(i)
        like: DiskLeaf | jax.ShapeDtypeStruct = (
            leaf if part.rows is None else self._programs.abstract(i, part.rows)
        )
        local = like.sharding.shard_shape(like.shape)
        # Shard by shard: a jax.device_put to several processes compares what they pass.
        return jax.make_array_from_single_device_arrays(
            like.shape,
            like.sharding,
            [
                jax.device_put(shard, device)
                for stored, chunks in zip(leaf.shards, reads, strict=True)
                for shard in [_joined(chunks).view(leaf.dtype).reshape(local)]
                for device in stored.devices
            ],
        )


def _write(
    programs: GroupPrograms, group: Group, going: Sequence[jax.Array], arrays: Sequence[Any]
) -> None:
    """Writes a program's results to the disk, in the background.

    Waits while the disk's buffers are full.
    """
    results = iter(going)
    for p in group:
        for i in filter(programs.on_disk, programs.targets(p)):
            leaf = arrays[i]
            if p.rows is None:
                leaf.fill(next(results))
            else:
                (k,) = _chunk_indices(programs, i, leaf, p)
                leaf.write(k, next(results))


def _chunk_indices(programs: GroupPrograms, i: int, leaf: DiskLeaf, part: GroupRows) -> list[int]:
    """Returns the indices of the chunks on disk that hold a part of the group."""
    if part.rows is None:
        return list(range(len(leaf.chunks)))
    return [[chunk.start for chunk in leaf.chunks].index(part.start * programs.row_size(i))]


def _joined(reads: Sequence[Future[np.ndarray]]) -> np.ndarray:
    parts = [read.result() for read in reads]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _starts(group: Group) -> np.ndarray:
    """Returns the first row of each part, int32 [parts]."""
    return np.array([p.start for p in group], np.int32)
