"""The compiled program of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from zerojax.accumulation.symbolic import TracedRows
from zerojax.collectives import Inserter, gather_once
from zerojax.collectives.gathering import Thresholds
from zerojax.collectives.host import Fetchable
from zerojax.devices.mesh import batch_devices, micro_batch_devices
from zerojax.distributed import log
from zerojax.evaluation import objects
from zerojax.evaluation.batch import Division, like, rows_of
from zerojax.evaluation.rows import ByRows, TracedFunction
from zerojax.evaluation.stages import Stages
from zerojax.evaluation.undivided import Undivided
from zerojax.graph.def_use import graph_of
from zerojax.graph.rows import RowDimensions
from zerojax.offload.disk_params import ParamReader, beside_disk
from zerojax.pipeline.schedule import Schedule
from zerojax.placement.states import States
from zerojax.plan.places import DEVICE, offloads, reaches_host
from zerojax.plan.quantized import sent_formats
from zerojax.plan.state_sharding import DTYPES
from zerojax.step.batch_placer import BatchPlacer
from zerojax.step.call import Further, RearrangedFunction
from zerojax.step.entering import enter
from zerojax.step.view import cast, constrainer
from zerojax.trace.explicit import Explicit, make_jaxpr
from zerojax.trace.late import with_late_weights
from zerojax.trace.ravelled import without_ravels
from zerojax.train_state.state_parts import OpenedState
from zerojax.xla import compat, hijax, jaxprs
from zerojax.xla.compiler import JitOnceDecided, options, streaming
from zerojax.xla.lowered import BATCH, EVALUATION, LoweredProgram, with_argument_names
from zerojax.xla.types import AnyJaxpr, PyTree


class Execution(NamedTuple):
    """The choices for batches of one shape; a static argument of the program.

    Attributes:
      used: For each array of the state, whether the function reads it.
      filled: The division by which the batch is padded: into micro-batches, or so that each
        process's own rows divide among its devices; None if neither is needed.
      full: The function on all rows.
      by_rows: The divided function; None if the function runs on all rows at once.
    """

    used: tuple[bool, ...]
    filled: Division | None
    full: TracedFunction
    by_rows: ByRows | None


class EvaluationProgram:
    """An evaluated function for one kind of state.

    Args:
      function: The user's function, in the order of :class:`zerojax.step.call.Call`.
      states: Shards and places states as the config asks.
      opened: A state of that kind.
      explicit: Axes and specs of the batch, for a function under explicit mesh axes; else None.
    """

    function: RearrangedFunction

    def __init__(
        self,
        function: RearrangedFunction,
        states: States,
        opened: OpenedState,
        explicit: Explicit | None = None,
    ) -> None:
        self.function, self._kind, self._explicit = function, opened.kind, explicit
        self._config, parts = states.config, opened.parts
        self._plan = plan = states.plan(opened)
        self._tree = jax.tree.structure(parts)
        self._low = DTYPES[self._config.compute_dtype]
        n = len(plan.compute)
        self._leaves = [*plan.compute, *plan.all_leaves()[n:]]
        dtypes = [x.dtype for x in (*plan.compute, *jax.tree.leaves(parts)[n:])]
        self._shapes = [
            jax.ShapeDtypeStruct(leaf.shape, dtype)
            for leaf, dtype in zip(self._leaves, dtypes, strict=True)
        ]
        self._placer = BatchPlacer(plan.lowering_mesh)
        sizes = self._config.batch(micro_batch_devices(plan.mesh))
        self._micro = sizes.micro
        self._stages: Stages | None = None
        if schedule := Schedule.of(plan.lowering_mesh, sizes.accumulation):
            self._stages = Stages(function.__name__, plan, schedule, states.warn_once)
            # Stages split a batch themselves: a part may have as many rows as a step's batch.
            self._micro = sizes.train and sizes.train // batch_devices(plan.mesh)
        overlap = self._config.overlap_comm is not False
        self._inserter = Inserter(
            plan.lowering_mesh,
            plan.axis,
            keep=self._config.stage < 3,
            share=True,
            overlap=overlap,
            sent=sent_formats(self._config),
            thresholds=Thresholds(small=self._config.small_array_size),
        )
        self._keeping = [constrainer(x) for x in jax.tree.leaves(plan.shardings().rest)]
        self._reader = ParamReader.of(states.config)
        self._state_placer = states.state_placer(plan)
        self._copies = states.placer.copies(plan) if offloads(self._config) else None
        self._known: dict[Hashable, Execution] = {}
        self._jitted = JitOnceDecided(
            with_argument_names(self._run, "state", BATCH, "further", "execution"),
            lambda: (
                streaming(plan.mesh)
                if reaches_host(self._config)
                else options(
                    plan.mesh, layer=max(self._inserter.layers, default=0), overlap=overlap
                )
            ),
            static_argnums=3,
        )

    def __call__(
        self, opened: OpenedState, batch: PyTree, further: Further
    ) -> tuple[PyTree, list[jax.Array | None]]:
        """Runs the function.

        Returns:
          The results, and the changed leaves of the rest of the state, see
          :func:`zerojax.evaluation.objects.call`.

        Raises:
          DiskStateError: A parameter's bytes on disk are not those that were written.
        """
        execution = self._execution(batch, further)
        values = self._values(opened, execution.used)
        if self._reader is not None:
            self._reader.use(values)
        given = beside_disk(values, self._leaves)
        if execution.filled is not None:
            batch = execution.filled.pad(batch, self._placer.leaves)
        placed = self._placer.place(batch)
        results = self._jitted(given, placed, further, execution)
        if self._reader is not None:
            self._reader.check(results)
        return results

    def _values(self, opened: OpenedState, used: Sequence[bool]) -> list[Any]:
        """Returns the arrays of a state at rest in order, with compute parameters in place of
        masters where copies exist; None for arrays that are not used.

        Raises:
          ValueError: The state is placed on another mesh.
        """
        n, leaves = len(self._plan.compute), jax.tree.leaves(opened.parts)
        if self._copies is None or not any(used[:n]):
            return self._state_placer.readable(leaves, used)
        # Copies exist of all parameters or of none.
        values = self._state_placer.readable(leaves, (*[True] * n, *used[n:]))
        values[:n] = self._copies.of(values[:n])
        return values

    def lowered(
        self, opened: OpenedState, batch: PyTree, further: Further
    ) -> Iterator[LoweredProgram]:
        """Yields the single program, lowered."""
        execution = self._execution(batch, further)
        copied = self._copies is not None
        taken = self._shapes if copied else jax.tree.leaves(opened.parts)
        values = [
            jax.ShapeDtypeStruct(leaf.padded, x.dtype, sharding=self._plan.sharding(leaf))
            if used
            else None
            for leaf, x, used in zip(self._leaves, taken, execution.used, strict=True)
        ]
        values = beside_disk(values, self._leaves)
        shapes = self._placer.shapes(batch)
        if execution.filled is not None:
            shapes = like(shapes, execution.filled.padded)
        placed = self._placer.abstract(shapes)
        traced = self._jitted.trace(values, placed, further, execution)
        reaches = reaches_host(self._config)
        yield LoweredProgram(
            EVALUATION, compat.lower_for(traced, self._plan.mesh) if reaches else traced.lower()
        )

    def _execution(self, batch: PyTree, further: Further) -> Execution:
        """Returns the choices for batches of these shapes, from the cache if they are known."""
        rows = self._placer.leaves
        blocks = 1 if rows.own_rows(batch) is None else rows.blocks
        batch_shapes = self._placer.shapes(batch)
        leaves, tree = jax.tree.flatten(batch_shapes)
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        arrays, others = jax.tree.flatten(further)
        key = shapes, tree, tuple(map(jax.typeof, arrays)), others, blocks
        if key not in self._known:
            self._known[key] = self._work_out(batch_shapes, blocks, further)
        return self._known[key]

    def _work_out(self, batch: PyTree, blocks: int, further: Further) -> Execution:
        """Traces the function, and decides how batches of these shapes are divided; logs why a
        batch is not divided."""
        rows = rows_of(batch)
        self._placer.check_tokens(batch)
        traced = self._traced(batch, further)
        jaxpr, _ = jaxprs.open_jaxpr(traced.closed)
        graph = graph_of(jaxpr)
        used = tuple(graph.times_used(v) > 0 for v in jaxpr.invars[: len(self._leaves)])
        filled = division = by_rows = None
        if rows is not None:
            filled = Division.of(rows, None, self._placer.world, blocks) if blocks > 1 else None
            division = Division.of(rows, self._micro, self._placer.world, blocks)
        if division is not None:
            try:
                by_rows = self._by_rows(traced, batch, further, division)
            except Undivided as reason:
                instead = f"not in {division.times} micro-batches of {division.part}"
                if division.times == 1:
                    instead = f"on every device, as they do not divide among {division.devices}"
                if division.rows > 1:
                    log.warning(
                        "evaluate: %s runs on all %d rows at once, %s: %s.",
                        self.function.__name__, division.rows, instead, reason,
                    )  # fmt: skip
                division = None
        return Execution(used, division or filled, traced, by_rows)

    def _traced(self, batch: PyTree, further: Further) -> TracedFunction:
        """Traces the function on abstract, unsharded arrays of a state."""

        def body(
            leaves: list[jax.Array], batch: PyTree, further: Further
        ) -> tuple[PyTree, list[jax.Array | None]]:
            if self._low is not None and self._config.auto_cast:
                batch = cast(batch, self._low)
            parts = jax.tree.unflatten(self._tree, leaves)
            return objects.call(self._kind, self.function, parts, batch, *further)

        # The function does not see memory kinds: it is traced as if all arrays were on the device.
        given = self._shapes, batch, further
        if self._explicit is None:
            closed, out = hijax.trace(body, *given)
        else:
            names, batch_specs = self._explicit
            state_specs = [leaf.own_spec for leaf in self._leaves]
            specs = (
                state_specs,
                jax.tree.unflatten(jax.tree.structure(batch), batch_specs),
                PartitionSpec(),
            )
            closed, out = make_jaxpr(body, given, specs, self._plan.lowering_mesh, names)
        rows = [bool(jnp.ndim(x)) for x in jax.tree.leaves(batch)]
        has_rows = [*[False] * len(self._leaves), *rows, *[False] * len(jax.tree.leaves(further))]
        traced = without_ravels(closed)
        if self._explicit is None:
            traced = with_late_weights(traced, len(self._leaves))
        return TracedFunction(traced, has_rows, jax.tree.structure(out))

    def _by_rows(
        self,
        full: TracedFunction,
        batch: PyTree,
        further: Further,
        division: Division,
    ) -> ByRows:
        """Returns the divided function.

        Raises:
          Undivided: The function cannot be divided.
        """
        rows = TracedRows.of(division.rows, division.part)
        try:
            part = self._traced(like(batch, rows.traced[1]), further)
        except Exception as error:
            raise Undivided(
                f"on {rows.traced[1]} rows it fails ({type(error).__name__}). Pass arrays with a "
                "row for each of the batch by batch_argnums"
            ) from error
        by_rows = ByRows(full, part, rows, padded=division.padded != division.rows)
        # Worked out here, where Undivided is caught, and not in the trace of the program.
        by_rows(division.part)
        return by_rows

    def _run(
        self,
        values: list[Any],
        batch: PyTree,
        further: Further,
        execution: Execution,
    ) -> tuple[PyTree, list[jax.Array | None]]:
        """Runs the function in the compiled program: the state enters as shards, and the function
        runs on all rows at once, or micro-batch by micro-batch."""
        cast_here = len(self._plan.compute) if self._copies is None else 0
        values = [
            x if x is None or leaf.place != DEVICE else self._plan.unpadded(x, leaf)
            for x, leaf in zip(values, self._leaves, strict=True)
        ]
        given = [
            # The sharding stays that of the state at rest, else XLA gathers first and casts then.
            constrainer(self._plan.sharding(leaf))(x.astype(leaf.dtype))
            if x is not None and i < cast_here
            else x
            for i, (x, leaf) in enumerate(zip(values, self._leaves, strict=True))
        ]
        entered = enter(self._inserter, self._plan, self._leaves, given, self._reader)
        state = gather_once.gather(*entered, self._inserter)
        arrays = jax.tree.leaves(further)
        filled = execution.filled
        if execution.by_rows is None:
            if filled is not None:
                batch = jax.tree.map(lambda x: filled.without_copies(x) if x.ndim else x, batch)
            closed = execution.full.closed
            if self._stages is not None:

                def smaller(n: int) -> AnyJaxpr:
                    return self._traced(like(batch, n), further).closed

                closed = self._stages(closed, smaller, execution.full.batch)
            outs = self._run_on(closed, state, jax.tree.leaves(batch), arrays)
        else:
            assert filled is not None
            outs = self._in_parts(state, batch, arrays, filled, execution.by_rows)
        out, changed = jax.tree.unflatten(execution.full.out, outs)
        pairs = zip(changed, self._keeping, strict=bool(changed))
        return self._plan.results(out), [None if x is None else keep(x) for x, keep in pairs]

    def _in_parts(
        self,
        state: list[object],
        batch: PyTree,
        arrays: list[jax.Array],
        division: Division,
        by_rows: ByRows,
    ) -> list[jax.Array]:
        """Runs the program of each micro-batch, and then the program that runs once."""
        parts = by_rows(division.part)
        leaves, mesh = jax.tree.leaves(batch), self._plan.lowering_mesh
        rows = [division.micro_batches(x, mesh) for x in leaves if x.ndim]
        counts = None
        if division.padded != division.rows:
            counts = division.micro_batches(jnp.asarray(division.counts()), mesh)

        def program(n: int) -> tuple[AnyJaxpr, PyTreeDef]:
            shapes = like((leaves, None if counts is None else counts[0]), n)
            return self._jaxpr(by_rows(n).part, [*shapes[0], *arrays], shapes[1])

        closed, results = program(division.part)
        if self._stages is not None:
            has_rows = [False] * len(self._shapes)
            has_rows += [bool(x.ndim) for x in leaves] + [False] * len(arrays)
            has_rows += [True] * (counts is not None)
            closed = self._stages(closed, lambda n: program(n)[0], has_rows)

        def part(
            totals: list[jax.Array], xs: tuple[list[jax.Array], jax.Array | None]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            slices = iter(xs[0])
            micro = [next(slices) if x.ndim else x for x in leaves]
            others = jax.tree.leaves((arrays, xs[1]))
            added, outs = jax.tree.unflatten(results, self._run_on(closed, state, micro, others))
            return parts.add(totals, added), outs

        totals = parts.zeros()
        if division.times == 1:
            totals, stacked = part(totals, jax.tree.map(lambda x: x[0], (rows, counts)))
            stacked = [x[None] for x in stacked]
        else:
            totals, stacked = lax.scan(part, totals, (rows, counts))
        outs = [division.in_rows(x, mesh) for x in stacked]
        others = [*[None if x.ndim else x for x in leaves], *arrays]
        closed, results = self._jaxpr(parts.finish, others, totals, outs)
        others = jax.tree.leaves((others, totals, outs))
        return [*jax.tree.unflatten(results, self._run_on(closed, state, [], others))]

    def _jaxpr(
        self, function: Callable[..., PyTree], others: list[Any], *more: PyTree
    ) -> tuple[AnyJaxpr, PyTreeDef]:
        """Traces ``function([*state, *others], *more)``; returns its results' structure too."""
        closed, out = jax.make_jaxpr(
            lambda state, others, *more: function([*state, *others], *more), return_shape=True
        )(self._shapes, others, *more)
        return closed, jax.tree.structure(out)

    def _run_on(
        self,
        closed: AnyJaxpr,
        state: Sequence[object],
        rows: Sequence[jax.Array],
        others: Sequence[object],
    ) -> list[jax.Array]:
        """Runs a program of these arguments, with parameters gathered where they are used; arrays
        among ``rows`` are [rows, ...]."""
        dims = [0 if x.ndim else None for x in rows]
        dims = [*[None] * len(state), *dims, *[None] * len(others)]
        row_dims = RowDimensions.of_program(closed, dims)
        outs = self._inserter(closed, [*state, *rows, *others], rows=row_dims)
        # A parameter on disk, or with padding in host memory, that the function returns unchanged.
        return [x.fetched() if isinstance(x, Fetchable) else x for x in outs]
