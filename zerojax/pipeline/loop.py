"""A loop over layers as a loop over ticks, in which every stage runs its own layers.

All collectives over "stage" are collective-permutes of one micro-batch between neighbours: of the
carry, which passes to the next stage, and of the stream, which brings the inputs of later
micro-batches to the first stage and the outputs of the last stage back to where the inputs were.
Sums over rows, such as gradients of the layers' weights, stay on their devices until the last tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.accumulation.kinds import RowKind
from zerojax.accumulation.reductions import REDUCTIONS
from zerojax.devices.mesh import STAGE
from zerojax.pipeline import layer
from zerojax.pipeline.schedule import Schedule
from zerojax.pipeline.slots import Streams, slots_spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation, HasEquations


class LayerLoop(NamedTuple):
    """A scan over layers, for one device's rows of one micro-batch.

    Attributes:
      equation: The scan, with the numbers of the global batch, see
        :func:`zerojax.accumulation.instances.instance`.
      operands, results: The kinds of its operands and results.
      dtypes: The dtype in which each result that is a sum is added up.
      symbolic: The scan on symbolic rows.
      rows: One device's rows of one micro-batch.
      same_for_all: By position, the programs of constants that have the same numbers for all rows,
        for one device's rows of one micro-batch.
    """

    equation: Equation
    operands: Sequence[RowKind]
    results: Sequence[RowKind]
    dtypes: Sequence[Any]
    symbolic: Equation
    rows: int
    same_for_all: Mapping[int, HasEquations]

    @property
    def scan(self) -> jaxprs.ScanParts:
        """The parts of the scan."""
        return jaxprs.scan_parts(self.equation)

    def is_stored(self, operand: int) -> bool:
        """Returns whether an operand is a stack of layers with rows, which is read from slots."""
        return operand >= self.scan.first_stack and self.operands[operand].rows

    def stores(self, result: int) -> bool:
        """Returns whether a result is a stack of layers with rows, which is written to slots."""
        return result >= self.scan.carry and self.results[result].rows

    def run(self, values: Sequence[jax.Array], schedule: Schedule) -> list[jax.Array]:
        """Runs the loop as a pipeline.

        Args:
          values: The operands on the global batch, those that are stored in slots.

        Returns:
          The results on the global batch, those that are stored in slots.
        """
        stage = Stage(self, schedule)
        outs = jax.shard_map(
            stage,
            mesh=schedule.mesh,
            in_specs=tuple(map(stage.operand_spec, range(len(values)))),
            out_specs=[*map(stage.result_spec, range(len(self.results)))],
            # Other axes, such as "model", stay automatic: XLA shards each layer over them.
            axis_names={*schedule.axes},
            # With the check, a carry of zeros has another type than one computed on own rows.
            check_vma=False,
        )(*values)
        return [
            REDUCTIONS[kind.name].over(x, (0,)) if kind.reduced else x
            for x, kind in zip(outs, self.results, strict=True)
        ]


class State(NamedTuple):
    """The carry of the loop over ticks.

    Attributes:
      arriving: The constants with rows and the carry, as the stage before has sent them.
      streams: The slots of the constants with rows and of the carry's arrays with rows.
      results: By result, rows that are stored, sums so far, or the latest value.
    """

    arriving: dict[int, jax.Array]
    streams: dict[int, jax.Array]
    results: dict[int, jax.Array]


class Stage:
    """The program of one stage on one device.

    Attributes:
      moving: Positions of the operands that go from stage to stage.
    """

    def __init__(self, loop: LayerLoop, schedule: Schedule) -> None:
        self.loop, self.schedule = loop, schedule
        scan = loop.scan
        self.n, self.length, self.reverse = scan.carry, scan.length // schedule.stages, scan.reverse
        self.streams = Streams(schedule, self.reverse)
        self.carry = range(scan.consts, scan.first_stack)
        consts = [i for i in range(scan.consts) if loop.operands[i].rows]
        self.moving = [*consts, *self.carry]

    def operand_spec(self, i: int) -> PartitionSpec:
        """Returns the spec of an operand."""
        kind = self.loop.operands[i]
        if self.loop.is_stored(i):
            return slots_spec(self.schedule, kind.dim + 1)
        if i >= self.carry.stop:
            return PartitionSpec(STAGE)
        return self.streams.spec(kind.dim) if kind.rows else PartitionSpec()

    def result_spec(self, i: int) -> PartitionSpec:
        """Returns the spec of a result."""
        kind, schedule = self.loop.results[i], self.schedule
        if self.loop.stores(i):
            return slots_spec(schedule, kind.dim + 1)
        if kind.rows:
            return self.streams.spec(kind.dim)
        sums = [schedule.row_axes] if kind.reduced else []
        return PartitionSpec(*sums, *([STAGE] if i >= self.n else []))

    def __call__(self, *values: jax.Array) -> list[jax.Array]:
        schedule, kinds = self.schedule, self.loop.operands
        stage = lax.axis_index(STAGE)
        # Loops of the backward pass run in reverse, and enter at the last stage.
        place = schedule.stages - 1 - stage if self.reverse else stage  # from the entrance
        streams = {
            i: self.streams.open(values[i], kinds[i].dim) for i in self.moving if kinds[i].rows
        }
        # Before the first tick nothing has arrived; what a stage computes of zeros does not count.
        arriving = {
            i: jnp.zeros_like(streams[i][0]) if i in streams else jnp.zeros_like(values[i])
            for i in self.moving
        }
        start = State(arriving, streams, self._empty())

        def tick(state: State, t: jax.Array) -> tuple[State, None]:
            return self._tick(state, t, place, values), None

        state, _ = lax.scan(tick, start, jnp.arange(schedule.ticks))
        return [self._result(i, state) for i in range(len(self.loop.results))]

    def _tick(
        self, state: State, t: jax.Array, place: jax.Array, values: Sequence[jax.Array]
    ) -> State:
        schedule, m = self.schedule, self.schedule.micro_batches
        entered = t - place  # how many micro-batches have entered before
        busy = (entered >= 0) & (entered < m)
        slot, first, last = t % schedule.slots, place == 0, place == schedule.stages - 1
        # All stages run one program: an idle one computes too, and its results do not count.
        micro_batch = self.streams.micro_batch(jnp.clip(entered, 0, m - 1))
        streams = {i: _entry(x, slot) for i, x in state.streams.items()}
        given = [*values]
        for i in self.moving:
            given[i] = jnp.where(first, streams.get(i, values[i]), state.arriving[i])
        number = self.loop.rows
        first = self.streams.first_row(micro_batch, number)
        rows = layer.Rows(first, number, number * schedule.parts, schedule.axes)
        outs, results = self._run_layers(given, state.results, rows, busy, micro_batch)
        leaving = {i: given[i] for i in self.moving} | dict(zip(self.carry, outs, strict=True))
        # Inputs and outputs rotate as the carry does: with arrays that all stages share, XLA
        # all-reduces a boundary in every tick, and exchanges them at entry and exit.
        streaming = {i: self._sent(x, -1) for i, x in streams.items()}
        for i in self.carry:
            if i in streaming:
                streaming[i] = jnp.where(last, leaving[i], streaming[i])
        for i in range(self.n):
            if i in results:
                results[i] = self._next_sum(i, state.results[i], outs[i], busy & last)
        return State(
            {i: self._sent(x, 1) for i, x in leaving.items()},
            {
                i: lax.dynamic_update_index_in_dim(state.streams[i], x, slot, 0)
                for i, x in streaming.items()
            },
            results,
        )

    def _run_layers(
        self,
        given: Sequence[jax.Array],
        results: dict[int, jax.Array],
        rows: layer.Rows,
        busy: jax.Array,
        micro_batch: jax.Array,
    ) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        """Runs the stage's layers on one micro-batch. Returns the carry and the
        results, which are written layer by layer, so that no stack of one micro-batch exists.

        Args:
          given: The operands.
          results: The results so far.
          rows: The rows of the micro-batch on this device.
          busy: Whether the results count.
          micro_batch: The slot where stored operands are read, and stored results written.
        """
        first, n, loop = self.carry.start, self.n, self.loop
        # The last slot is never read.
        target = jnp.where(busy, micro_batch, self.schedule.micro_batches)
        pair = layer.EquationPair(loop.symbolic, loop.equation)

        def run(state: Any, i: jax.Array) -> Any:
            carry, results = state
            entries = [
                _entry(_entry(x, micro_batch), i) if loop.is_stored(k) else _entry(x, i)
                for k, x in enumerate(given)
                if k >= self.carry.stop
            ]
            outs = layer.run(pair, [*given[:first], *carry, *entries], rows)
            written = dict(results)
            for k in range(n, len(outs)):
                place = (target, i) if loop.stores(k) else (i,)
                new, rest = outs[k], results[k].ndim - len(place)
                if not loop.stores(k):
                    new = self._next_sum(k, _entry(results[k], i), new, busy)
                start = (*place, *[jnp.zeros((), i.dtype)] * rest)
                new = new.reshape((1,) * len(place) + new.shape)
                written[k] = lax.dynamic_update_slice(results[k], new, start)
            return (outs[:n], written), None

        start = [*given[first : self.carry.stop]], results
        (carry, results), _ = lax.scan(run, start, jnp.arange(self.length), reverse=self.reverse)
        return carry, results

    def _next_sum(self, i: int, old: jax.Array, new: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns a sum so far, or the latest value, after a value that may count."""
        if self.loop.results[i].reduced:
            both = REDUCTIONS[self.loop.results[i].name].of_two
            new = both(old, new.astype(old.dtype))
        return jnp.where(counts, new, old)

    def _sent(self, x: jax.Array, by: int) -> jax.Array:
        """Sends an array ``by`` stages on in the direction of the pipeline."""
        n, by = self.schedule.stages, -by if self.reverse else by
        return lax.ppermute(x, STAGE, [(i, (i + by) % n) for i in range(n)])

    def _empty(self) -> dict[int, jax.Array]:
        """Returns the results before the first tick, except those that come back in the streams."""
        empty = {}
        for i, (v, kind) in enumerate(
            zip(self.loop.equation.outvars, self.loop.results, strict=True)
        ):
            shape, dtype = v.aval.shape, v.aval.dtype
            if i >= self.n:
                shape = (self.length, *shape[1:])
            if self.loop.stores(i):
                # One slot more, to which idle stages write.
                empty[i] = jnp.zeros((self.schedule.micro_batches + 1, *shape), dtype)
            elif kind.reduced:
                dtype = self.loop.dtypes[i]
                empty[i] = jnp.full(shape, REDUCTIONS[kind.name].neutral(dtype), dtype)
            elif not kind.rows:
                empty[i] = jnp.zeros(shape, dtype)
        return empty

    def _result(self, i: int, state: State) -> jax.Array:
        kind, schedule = self.loop.results[i], self.schedule
        if i < self.n and kind.rows:
            return self.streams.close(state.streams[self.carry[i]], kind.dim)
        value = state.results[i]
        if i < self.n and not kind.rows:
            last = 0 if self.reverse else schedule.stages - 1
            value = lax.all_gather(value, STAGE)[last]  # only the last stage has it
        if kind.reduced:  # devices send the dtype of the gradients, as with one micro-batch
            value = value.astype(self.loop.equation.outvars[i].aval.dtype)
        # Sums of one device get a dimension, over which XLA adds them after the last tick.
        return value[None] if kind.reduced else value


def _entry(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)
