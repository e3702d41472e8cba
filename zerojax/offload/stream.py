"""The programs that take sub-groups through the device.

One program brings the next sub-group in from host memory, updates the present one, and sends its
results back. XLA runs the copies on separate streams, so that they overlap the update. Three
halves of a sub-group (:mod:`zerojax.offload.groups`) are in device memory at a time, whatever the
size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.host import fetch_to_device, send_to_host
from zerojax.collectives.matrices import MatrixUpdate
from zerojax.collectives.order import impossible
from zerojax.offload.groups import ArrayPlacement, Group, GroupRows, is_sent_unsplit
from zerojax.offload.separate import SeparatedUpdate
from zerojax.plan import layout
from zerojax.plan.places import DISK, HOST, PINNED
from zerojax.plan.stored import pad
from zerojax.xla.compiler import Options
from zerojax.xla.lowered import LOADED, READ, WRITTEN, with_argument_names

_ARGUMENTS = WRITTEN, READ, LOADED, "starts", "next_starts", "scalars"


class GroupArrays(NamedTuple):
    """Indices of the arrays that one program takes, in the order of their use.

    Attributes:
      written: Arrays that the update replaces; they are donated.
      read: Arrays that are only read.
      loaded: Arrays of the present group that were brought in before the program runs.
      coming: Arrays of the next group that the program brings in.
      going: Arrays of the present group that are stored on disk; their new values are returned.
    """

    written: tuple[int, ...]
    read: tuple[int, ...]
    loaded: tuple[int, ...]
    coming: tuple[int, ...]
    going: tuple[int, ...]


class GroupResults(NamedTuple):
    """Results of one program: lists in the order of :class:`GroupArrays`."""

    written: list[Any]
    coming: list[Any]
    going: list[Any]


class GroupPrograms:
    """The programs of one update, each built once.

    Args:
      separated: The update.
      placements: The placement of each array: the arguments of the update, then further results.
      target: For each result of the update, the index of the array that it replaces.
      gatherer: Has the devices to lower for.
      options: Compiler options.
    """

    def __init__(
        self,
        separated: SeparatedUpdate,
        placements: Sequence[ArrayPlacement],
        target: Sequence[int],
        gatherer: Gatherer,
        options: Options | None = None,
    ) -> None:
        self._options = options
        self._separated, self._target = separated, target
        self._gatherer, self._mesh = gatherer, gatherer.mesh
        # shard_map takes axes of the mesh, not axes that ZeRO has joined.
        self._placements = [
            x._replace(spec=PartitionSpec(*layout.separate(x.spec, self._mesh))) for x in placements
        ]
        self._programs: dict[object, Callable[..., GroupResults]] = {}

    def numbers(self, group: Group, coming: Group) -> GroupArrays:
        """Returns the arrays of the program that updates ``group`` and brings ``coming`` in."""
        outputs = [i for p in group for i in self.targets(p)]
        written = tuple(i for i in outputs if not self.on_disk(i))
        present = [
            i
            for p in group
            for i in p.cluster.inputs
            if not self.on_disk(i) and (p.rows is None or not self._streams(i))
        ]
        incoming = tuple(i for p in coming for i in self.streamed(p) if self._is(i, HOST))
        read = dict.fromkeys(i for i in (*present, *incoming) if i not in written)
        return GroupArrays(
            written=written,
            read=tuple(read),
            loaded=tuple(i for p in group for i in self.loaded(p)),
            coming=incoming,
            going=tuple(filter(self.on_disk, outputs)),
        )

    def _is(self, i: int, place: str) -> bool:
        return self._placements[i].place == place

    def _streams(self, i: int) -> bool:
        """Returns whether an array is brought in before the update that needs it."""
        return self.on_disk(i) or self._is(i, HOST)

    def on_disk(self, i: int) -> bool:
        """Returns whether an array is stored on disk."""
        return self._is(i, DISK)

    def loaded(self, part: GroupRows) -> list[int]:
        """Returns the arrays that are brought in, by rows or unsplit, before the program runs."""
        if part.rows is None:
            return [*filter(self.on_disk, part.cluster.inputs)]
        return self.streamed(part)

    def targets(self, part: GroupRows) -> list[int]:
        """Returns the arrays that the results of a cluster replace."""
        return [self._target[o] for o in part.cluster.outputs]

    def streamed(self, part: GroupRows) -> list[int]:
        """Returns the arrays of which rows are brought in before the update."""
        return [] if part.rows is None else [i for i in part.cluster.inputs if self._streams(i)]

    def get(self, group: Group, coming: Group) -> Callable[..., GroupResults]:
        """Returns ``program(written, read, loaded, starts, next_starts, scalars)``.

        The first three arguments are lists in the order of :meth:`numbers`, ``starts`` and
        ``next_starts`` are the first rows of each part of ``group`` and of ``coming``, int32
        [parts], and ``scalars`` are the prelude's.
        """
        # By shapes and equations, not by arrays: equal layers are updated by one program.
        key = self._signature(group), self._signature(coming), self._shared(group, coming)
        if key not in self._programs:
            is_unsplit = is_sent_unsplit(group)
            self._programs[key] = (
                self._unsplit(group) if is_unsplit else self._advance(group, coming)
            )
        return self._programs[key]

    def _signature(self, group: Group) -> tuple[object, ...]:
        return tuple(
            (
                p.cluster.key,
                p.rows,
                tuple(self._placements[i] for i in p.cluster.inputs),
                tuple(self._placements[i] for i in self.targets(p)),
            )
            for p in group
        )

    def _shared(self, group: Group, coming: Group) -> tuple[tuple[int, ...], ...]:
        """Returns each coming array's position in ``written`` and in ``read``; -1 where absent."""
        numbers = self.numbers(group, coming)
        return tuple(
            tuple(present.index(i) if i in present else -1 for i in numbers.coming)
            for present in (numbers.written, numbers.read)
        )

    def _sharding(self, i: int) -> NamedSharding:
        """Returns the sharding of an array, including its memory kind."""
        placement = self._placements[i]
        kind = PINNED if placement.place == HOST else None
        return NamedSharding(self._mesh, placement.spec, memory_kind=kind)

    def row_size(self, i: int) -> int:
        """Returns the elements of a row of an array, on each device."""
        return self._placements[i].row_size(self._mesh)

    def _rows_spec(self, i: int) -> PartitionSpec:
        """Returns the spec of an array's rows, stacked over the devices in the first dimension."""
        axes = self._placements[i].axes()
        return PartitionSpec(axes) if axes else PartitionSpec()

    def _rows_specs(self, numbers: Sequence[int]) -> list[PartitionSpec]:
        return [self._rows_spec(i) for i in numbers]

    def _rows_sharding(self, i: int) -> NamedSharding:
        return NamedSharding(self._mesh, self._rows_spec(i))

    def abstract(self, i: int, rows: int | None = None) -> jax.ShapeDtypeStruct:
        """Returns an abstract array in its memory, or ``rows`` of each shard on the device."""
        x = self._placements[i]
        if rows is None:
            return jax.ShapeDtypeStruct(x.padded, x.dtype, sharding=self._sharding(i))
        devices = math.prod(self._mesh.shape[a] for a in x.axes())
        shape = (rows * devices, *x.rows(self._mesh)[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self._rows_sharding(i))

    def _advance(self, group: Group, coming: Group) -> Callable[..., GroupResults]:
        """Builds the program that updates rows of the clusters of ``group``, on each device its
        own, and brings the rows of ``coming`` in."""
        numbers, mesh = self.numbers(group, coming), self._mesh

        def local(*given: Any) -> GroupResults:
            written, read, loaded, starts, next_starts, scalars = given
            arrays = {
                i: x.reshape(self._placements[i].rows(mesh))
                for i, x in zip((*numbers.written, *numbers.read), (*written, *read), strict=True)
            }
            incoming = {
                i: fetch_to_device(_rows(arrays[i], next_starts[k], p.rows))
                for k, p in enumerate(coming)
                for i in self.streamed(p)
                if self._is(i, HOST)
            }
            ready = dict(zip(numbers.loaded, loaded, strict=True))
            disk_results = {}
            for k, p in enumerate(group):
                values = [
                    ready[i] if i in ready else _rows(arrays[i], starts[k], p.rows)
                    for i in p.cluster.inputs
                ]
                c = p.cluster
                outs = self._separated.run(c.outputs, c.inputs, values, scalars, values[0].shape)
                for i, new in zip(self.targets(p), outs, strict=True):
                    if self.on_disk(i):
                        disk_results[i] = new
                        continue
                    # Read the next rows before this write; otherwise XLA copies the array.
                    at = starts[k] + (_after(incoming[i]) if i in incoming else 0)
                    new = send_to_host(new) if self._is(i, HOST) else fetch_to_device(new)
                    arrays[i] = lax.dynamic_update_slice_in_dim(arrays[i], new, at, 0)
            return GroupResults(
                [arrays[i].reshape(x.shape) for i, x in zip(numbers.written, written, strict=True)],
                [incoming[i] for i in numbers.coming],
                [disk_results[i] for i in numbers.going],
            )

        no_axes = PartitionSpec()
        written = [self._placements[i].spec for i in numbers.written]
        read = [self._placements[i].spec for i in numbers.read]
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(written, read, self._rows_specs(numbers.loaded), no_axes, no_axes, no_axes),
            out_specs=GroupResults(
                written, self._rows_specs(numbers.coming), self._rows_specs(numbers.going)
            ),
            check_vma=False,
        )
        return self._jitted(mapped, numbers, self._rows_sharding)

    def _unsplit(self, group: Group) -> Callable[..., GroupResults]:
        """Builds the program that updates complete clusters, and brings no other group in."""
        numbers = self.numbers(group, ())
        inputs = [i for p in group for i in p.cluster.inputs]
        outputs = [i for p in group for i in p.cluster.outputs]
        targets = [self._target[o] for o in outputs]
        shapes = [self._placements[i].shape for i in inputs]
        specs = [
            layout.full(self._placements[i].spec, len(s))
            for i, s in zip(inputs, shapes, strict=True)
        ]
        scalar = [()] * len(self._separated.scalars)
        distribute = MatrixUpdate(self._gatherer, [*scalar, *shapes], [*scalar, *specs])

        def run(*given: Any) -> GroupResults:
            written, read, loaded, _, _, scalars = given
            present = (*numbers.written, *numbers.read, *numbers.loaded)
            arrays = dict(zip(present, (*written, *read, *loaded), strict=True))
            values = [self._unpadded(i, fetch_to_device(arrays[i])) for i in inputs]
            update = lambda s, *v: self._separated.run(outputs, inputs, v, s)  # noqa: E731
            results = distribute(jax.make_jaxpr(update)(scalars, *values), [*scalars, *values])
            updated = {i: self._padded(i, x) for i, x in zip(targets, results, strict=True)}
            return GroupResults(
                [updated[i] for i in numbers.written], [], [updated[i] for i in numbers.going]
            )

        return self._jitted(run, numbers, self._sharding)

    def _unpadded(self, i: int, x: jax.Array) -> jax.Array:
        """Strips the padding of an array on the device; each device keeps its shard."""
        shape = self._placements[i].shape
        return x if x.shape == shape else self._on_device(i, x[tuple(map(slice, shape))])

    def _padded(self, i: int, x: jax.Array) -> jax.Array:
        """Pads a result, and shards it before it leaves the device."""
        # Collectives cannot run in host memory.
        return self._on_device(i, pad(x, self._placements[i].padded))

    def _on_device(self, i: int, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, self._placements[i].spec))

    def _jitted(
        self,
        function: Callable[..., GroupResults],
        numbers: GroupArrays,
        going: Callable[[int], NamedSharding],
    ) -> Callable[..., GroupResults]:
        """Jits a function; its results for the disk have the shardings that ``going`` returns."""
        return jax.jit(
            with_argument_names(function, *_ARGUMENTS),
            # XLA writes the rows of a donated array in place.
            donate_argnums=(0,),
            compiler_options=self._options,
            out_shardings=GroupResults(
                [self._sharding(i) for i in numbers.written],
                [self._rows_sharding(i) for i in numbers.coming],
                [going(i) for i in numbers.going],
            ),
        )


def _rows(x: jax.Array, start: jax.typing.ArrayLike, rows: int | None) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, rows or x.shape[0], 0)


def _after(came: jax.Array) -> jax.Array:
    """Returns zero, int32 [], that depends on ``came``."""
    return impossible(came[(0,) * came.ndim]).astype(jnp.int32)
