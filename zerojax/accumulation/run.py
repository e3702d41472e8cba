"""One step of ``k`` micro-batches: the step is divided, and its programs run one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import UNDIVIDED
from zerojax.accumulation.flat import Flat, flatten
from zerojax.accumulation.instances import global_instance
from zerojax.accumulation.lanes import Lanes, rows_of_all
from zerojax.accumulation.reductions import REDUCTIONS
from zerojax.accumulation.resolve import analyse
from zerojax.accumulation.roles import (
    Roles,
    carried,
    per_micro_batch,
    refuse_statistics,
    warn_of_differences,
)
from zerojax.accumulation.split import ByPart, Crossing, Split, split
from zerojax.accumulation.symbolic import Symbolic, TracedRows, UnevenError
from zerojax.accumulation.traces import symbolic_program
from zerojax.collectives import Inserter, Shard, target_specs
from zerojax.collectives.decisions import AFTER_LOOP, SUMMED_FIRST
from zerojax.collectives.gathering import Replacements, plain
from zerojax.collectives.reduction import add_up, is_quantized, of_all
from zerojax.devices.mesh import REPLICA
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE, MOVES_OR_ROUNDS
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.lines import raised_at
from zerojax.xla.types import AnyJaxpr, Atom, Aval, PyTree

Trace = Callable[[PyTree], tuple[AnyJaxpr, PyTree]]
"""Function from a batch to the jaxpr of the step, and the shapes of its results."""

Arguments = Sequence[Any]
"""Arguments of a step: leaves of the batch are [k, rows, ...], parameters in the form that the
inserter takes."""

_REMEDY = "Compute the same for any number of rows, or " + UNDIVIDED


def accumulator(
    param: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike | None
) -> jax.typing.DTypeLike:
    """Returns the dtype in which gradients of dtype ``param`` are summed: ``dtype`` if given, else
    float32 at least."""
    # Given by DeepSpeed's data_types.grad_accum_dtype. In bfloat16 a sum of 256 equal gradients no
    # longer grows.
    return jnp.promote_types(param, jnp.float32) if dtype is None else dtype


def symbolic_step(
    trace: Trace, closed: AnyJaxpr, batch: PyTree, roles: Roles, rows: TracedRows
) -> Symbolic:
    """Returns a step on symbolic rows.

    Args:
      trace: Traces the step.
      closed: The step on the global batch.
      batch: The shapes of the global batch, leaves [rows, ...].
      roles: The roles of the step's arguments.
      rows: The rows of the global batch, and of another to trace the step on.

    Raises:
      UnevenError: The step depends on the number of rows in more than numbers.
    """
    n = rows.traced[1]
    shapes = jax.tree.map(lambda x: jaxprs.like(x, (n, *x.shape[1:])) if x.shape else x, batch)
    try:
        other = trace(shapes)[0]
    except Exception as e:  # the same step has been traced on the global batch
        raise _number_written_out(e, *rows.traced) from e
    one, two = (flatten(x, roles.learned, roles.batch) for x in (closed, other))
    return symbolic_program(one, two, rows)


def _number_written_out(error: Exception, global_rows: int, rows: int) -> UnevenError:
    place = raised_at(error)
    first = (str(error).splitlines() or [""])[0]
    uneven = UnevenError(
        f"traced on a micro-batch of {rows} rows it raises {type(error).__name__}"
        f"{f' at {place}' if place else ''}: {first.removesuffix('.')}"
    )
    uneven.remedy = (
        f"Replace the number {global_rows} by the array's own size (len(x), or -1 in reshape); "
        f"make an array with as many rows part of the batch; or {UNDIVIDED}"
    )
    return uneven


def rows_together(batch: PyTree) -> PyTree:
    """Returns the shapes of the global batch: leaves [k, rows, ...] become [k * rows, ...]."""
    return jax.tree.map(
        lambda x: jaxprs.like(x, (x.shape[0] * x.shape[1], *x.shape[2:])) if x.shape else x, batch
    )


class MicroBatches:
    """A traced step that runs micro-batch by micro-batch with the numbers of the global batch.

    The equations that gradients are computed from run for each micro-batch, with the state at
    entry, and their sums over rows are added up. Equations that depend on those sums (the update,
    norms, conditions, results) run once.

    Args:
      trace: Traces the step.
      global_jaxpr: The jaxpr on the global batch.
      batch: Arrays or their shapes, [k, rows, ...].
      roles: The roles of the step's arguments and results.
      k: Micro-batches per step.
      blocks: Blocks of rows, one per process; every micro-batch has an equal share of each.
      inserter: Gathers parameters where they are used.
      want: Target specs of the results that are sharded; None for the others.
      statistics: Whether micro-batches may have statistics of their own rows that the state keeps.
      sharded: Whether gradients are reduce-scattered as soon as they are computed.
      lanes: Lanes that sum separately until the end, used if the step can run on them.
      dtype: Dtype in which gradients are summed; None for their own, float32 at least.

    Attributes:
      lanes: The lanes on which the step runs; None if it runs without.

    Raises:
      ValueError: The results would differ from those of the global batch.
    """

    def __init__(
        self,
        trace: Trace,
        global_jaxpr: AnyJaxpr,
        batch: PyTree,
        roles: Roles,
        k: int,
        blocks: int,
        inserter: Inserter,
        want: Sequence[Spec | None],
        *,
        statistics: bool,
        sharded: bool,
        lanes: Lanes | None,
        dtype: jax.typing.DTypeLike | None,
    ) -> None:
        self._k, self._blocks, self._inserter = k, blocks, inserter
        self._dtype, self._roles, self._statistics = dtype, roles, statistics
        ((_, rows),) = {x.shape[:2] for x in jax.tree.leaves(batch) if x.shape}
        try:
            symbolic = symbolic_step(
                trace, global_jaxpr, rows_together(batch), roles, TracedRows.of(k * rows, rows)
            )
            flat = global_instance(symbolic, symbolic.flat)
            self._want = [*want] or [None] * len(flat.outvars)
            self._wants = target_specs.trace_back(flat, self._want, inserter.mesh)
            self._sharded = sharded
            divided = None if lanes is None else self._divide_into(lanes, symbolic, flat, rows)
            self.lanes: Lanes | None = None if divided is None else lanes
            # Without lanes each micro-batch's gradients are reduced; quantization needs shards.
            self._sharded |= divided is None and inserter.sent.gradients is not None
            self._split, analysis = divided or self._divide(symbolic, rows)
        except UnevenError as e:
            raise ValueError(
                f"{roles.name} cannot be accumulated over {k} micro-batches: it depends on the "
                f"number of rows ({e}{e.contrast}). {e.remedy or _REMEDY}"
            ) from e
        warn_of_differences(roles.name, analysis, k)

    def _divide_into(
        self, lanes: Lanes, symbolic: Symbolic, flat: Flat, rows: int
    ) -> tuple[Split, Analysis] | None:
        """Divides the step into each lane's micro-batches; returns None if lanes would change the
        numbers, or be slower."""
        axis = self._inserter.axis
        parts = any(len(layout.parts_of(spec, axis)) > 1 for spec in self._wants.values())
        if (parts and self._sharded) or not lanes.may_suit(flat):
            return None
        try:
            divided = self._divide(symbolic, rows // lanes.number)
        except (UnevenError, ValueError):
            return None
        return divided if _suits_lanes(*divided, lanes) else None

    def _divide(self, symbolic: Symbolic, rows: int) -> tuple[Split, Analysis]:
        """Returns the programs for micro-batches of some rows, and the step's analysis."""
        roles, flat = self._roles, symbolic.flat
        analysis, choices = analyse(symbolic, roles.kinds(flat), rows, roles.rest)
        carry = carried(flat, analysis, roles.rest)
        if not self._statistics:
            refuse_statistics(roles, analysis, flat, self._k)
        stacked = per_micro_batch(flat, analysis, roles, carry, self._k)
        wants, axis = self._wants, self._inserter.axis
        if not self._sharded:
            wants = {v: layout.without(spec, axis) for v, spec in wants.items()}
        return split(symbolic, analysis, rows, choices.first, stacked, carry, wants), analysis

    def __call__(self, args: Arguments, replace: Replacements) -> list[jax.Array]:
        """Runs the step.

        Args:
          args: Arguments of the step; leaves of the batch are [k, rows, ...], parameters in the
            form that the inserter takes.
          replace: See :class:`zerojax.collectives.Inserter`.

        Returns:
          The step's results.
        """
        split = self._split
        rows = [i for i in self._roles.batch if jnp.ndim(args[i])]
        first = self._computed_first(args, rows, replace)
        crossing, others = self._micro_batches(args, rows, first, replace)
        # The rest of the step runs once, without the rows of the batch.
        last = [x[-1] for x in others[: split.n_last]]
        placeholders = [None if i in rows else x for i, x in enumerate(args)]
        want = [self._want[i] for i in split.done]
        given = [*placeholders, *first, *crossing, *last]
        done = self._inserter(split.once, given, replace, want)
        results = dict(zip(split.done, done, strict=True))
        for each, x in zip(split.stacked, others[split.n_last :], strict=True):
            results[each.position] = self._of_all(each, x)
        return [results[i] for i in range(len(results))]

    def _computed_first(
        self, args: Arguments, rows: Sequence[int], replace: Replacements
    ) -> list[jax.Array]:
        """Returns the values that depend only on the batch, computed from the global batch;
        ``rows`` has the positions of its arrays."""
        if not self._split.first.outvars:
            return []
        args = list(args)
        for i in rows:
            args[i] = args[i].reshape(-1, *args[i].shape[2:])
        first = self._split.first
        return self._inserter(first, args, replace, rows=self._rows(first))

    def _micro_batches(
        self,
        args: Arguments,
        rows: Sequence[int],
        first: Sequence[jax.Array],
        replace: Replacements,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the loop over micro-batches. Returns the reductions over all of them, and the other
        results, stacked."""
        split, inserter, n = self._split, self._inserter, len(self._split.crossing)
        micro_inserter = inserter if self._sharded else inserter.deferring_reductions()
        if self.lanes is not None:
            micro_inserter = micro_inserter.on_lanes(self.lanes.axes)
        row_dims = self._rows(split.micro)
        adding = [i for i, x in enumerate(split.crossing) if x.how == "sum"]
        specs = [x.spec for x in split.crossing]
        want = [*specs, *[None] * (len(split.micro.outvars) - n)]

        entering = args if self.lanes is None else self.lanes.entering(args)

        # A micro-batch takes the state from the one before, and the sums so far. It returns both,
        # its other reductions, and the results that each micro-batch computes.
        def micro(
            state: tuple[list[jax.Array], list[jax.Array]], slices: list[jax.Array]
        ) -> tuple[PyTree, PyTree]:
            passed, sums = state
            given = list(entering)
            for i, x in zip(split.carry, passed, strict=True):
                given[i] = self._as_given(args[i], x)

            def part(slices: Sequence[jax.Array]) -> list[jax.Array]:
                for i, x in zip(rows, slices, strict=True):
                    given[i] = x
                return micro_inserter(split.micro, [*given, *first], replace, want, rows=row_dims)

            outs = part(slices) if self.lanes is None else self.lanes.run(part, slices)
            crossing, others = outs[:n], outs[n:]
            # DeepSpeed averages the micro-batches' losses, whatever share of the tokens each masks.
            # Sums of the step's own numerators and divisors give the loss of the global batch.
            sums = [
                self._constrained(split.crossing[i], total + crossing[i].astype(total.dtype))
                for i, total in zip(adding, sums, strict=True)
            ]
            combined = [x for i, x in enumerate(crossing) if i not in adding]
            end = len(others) - len(split.carry)
            passes = zip(split.carry, others[end:], strict=True)
            passed = [plain(self._as_given(args[i], x)) for i, x in passes]
            return (passed, sums), (combined, others[:end])

        zeros = [self._zero(split.crossing[i], split.micro.outvars[i].aval) for i in adding]
        start = [plain(args[i]) for i in split.carry], zeros
        xs = [args[i] for i in rows]
        traced = inserter.ledger.last_trace(micro)
        with inserter.ledger.repeats(self._k):
            (_, sums), (combined, others) = lax.scan(traced, start, xs, length=self._k)
        # The reductions over all micro-batches, in the order of `split.crossing`.
        totals, series = iter(sums), iter(combined)
        axes = (0,) if self.lanes is None else (0, 1)
        crossing = [
            self._finished(x, next(totals), v)
            if x.how == "sum"
            else REDUCTIONS[x.how].over(next(series), axes)
            for x, v in zip(split.crossing, split.micro.outvars, strict=False)
        ]
        return crossing, others

    def _of_all(self, part: ByPart, x: jax.Array) -> jax.Array:
        """Returns a result of the step, from those of all micro-batches [k, ...]."""
        kind = part.kind
        x = jnp.mean(x, axis=0) if part.averaged else x
        if self.lanes is not None:
            x = jax.vmap(lambda x: rows_of_all(x, kind))(x)
        if kind.rows and kind.outer is not None:
            x = _in_order(x, kind.dim, kind.outer, self._blocks)
        if part.position in self._roles.as_batch and kind.rows and not kind.dim:
            x = x.reshape(-1, *x.shape[2:])
        return x

    def _rows(self, jaxpr: AnyJaxpr) -> RowDimensions:
        """Returns the dimensions of rows in a program of the step's arguments, and of others."""
        batch = {*self._roles.batch}
        invars = jaxprs.open_jaxpr(jaxpr)[0].invars
        dims = [0 if i in batch and v.aval.ndim else None for i, v in enumerate(invars)]
        return RowDimensions.of_program(jaxpr, dims)

    def _as_given(self, argument: object, value: jax.Array) -> jax.Array | Shard:
        """Shards state that one micro-batch passes to the next like the step's argument."""
        if not isinstance(argument, Shard):
            return value
        return Shard(self._inserter.constrain(value, argument.spec), argument.spec)

    def _zero(self, x: Crossing, aval: Aval) -> jax.Array:
        dtype: jax.typing.DTypeLike = aval.dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            dtype = accumulator(dtype, None if x.spec is None else self._dtype)
        lane_dims = () if self.lanes is None else (self.lanes.number,)
        return self._constrained(x, jnp.zeros((*lane_dims, *aval.shape), dtype))

    def _constrained(self, x: Crossing, value: jax.Array) -> jax.Array:
        # The sharding matches both sides of the loop, else XLA chooses another one for the carry.
        if self.lanes is not None:
            return self.lanes.constrain(value, x.spec)
        return value if x.spec is None else self._inserter.constrain(value, x.spec)

    def _finished(self, x: Crossing, total: jax.Array, v: Atom) -> jax.Array:
        """Returns the sum over all micro-batches of their results ``v``."""
        dtype, ledger = x.variable.aval.dtype, self._inserter.ledger
        graph = graph_of(self._split.micro)
        with ledger.at(graph.producer(graph.origin(v, ELEMENTWISE | MOVES_OR_ROUNDS))):
            if self.lanes is not None:
                total = self._reduced(x, total)
            elif x.spec is not None:
                if not self._sharded and (spec := self._wants.get(x.variable)) is not None:
                    # XLA moves the reduction after the loop.
                    ledger.reduces_late(AFTER_LOOP, SUMMED_FIRST, total, spec)
                total = self._inserter.constrain(total, x.spec)
        if x.wide and jnp.finfo(total.dtype).bits >= jnp.finfo(dtype).bits:
            return total
        return total.astype(dtype)

    def _reduced(self, x: Crossing, totals: jax.Array) -> jax.Array:
        """Sums over all lanes; devices send the dtype of the gradients, as with one micro-batch."""
        assert self.lanes is not None
        spec = self._wants.get(x.variable)
        low = totals.astype(x.variable.aval.dtype)
        if spec is not None and is_quantized(low.shape[1:], spec, self._inserter):
            return of_all(low, spec, self._inserter).astype(totals.dtype)
        ledger, total = self._inserter.ledger, add_up(low, 0)
        with ledger.place(AFTER_LOOP, SUMMED_FIRST), ledger.of(spec):
            if spec is None or self.lanes.axes == (REPLICA,):
                full_spec = spec or (None,) * total.ndim
                ledger.reduces(total, full_spec, full_spec, over=self.lanes.number)
                total = total if spec is None else self._inserter.constrain(total, spec)
            else:
                total = self._inserter.scatter_parts(total, spec)
        return total.astype(totals.dtype)


def _suits_lanes(split: Split, analysis: Analysis, lanes: Lanes) -> bool:
    """Returns whether lanes compute a step's numbers, as fast as without."""
    # Noise in the batch's shape would be the same on all lanes, statistics would be of each lane's
    # own rows, and state that the batch changes would differ from lane to lane.
    differs = analysis.drawn or analysis.owners or split.carry or split.n_last
    all_rows = all(x.kind.rows for x in split.stacked)
    return not differs and all_rows and lanes.suit(split.micro)


def _in_order(x: jax.Array, dim: int, outer: int, blocks: int) -> jax.Array:
    """Sorts the rows of micro-batches, which each have a share of every block, by blocks.

    Args:
      x: [k, ...], where dimension ``dim`` after the first holds the rows of a micro-batch, in
        ``outer`` stretches one after another.
    """
    if blocks == 1:
        return x
    k, rows = x.shape[0], jnp.moveaxis(x, dim + 1, 1)
    n, rest = rows.shape[1] // outer, rows.shape[2:]
    rows = rows.reshape(k, outer, blocks, n // blocks, *rest)
    rows = jnp.moveaxis(rows, 0, 2).reshape(outer, k, n, *rest)
    return jnp.moveaxis(jnp.swapaxes(rows, 0, 1).reshape(k, outer * n, *rest), 1, dim + 1)
