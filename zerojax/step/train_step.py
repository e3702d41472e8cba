"""The decorated call: the course of a step, from its arguments to its results.

:meth:`Step.__call__` sorts the arguments; recognizes the state that the last step left, or opens
and places another one (``_begin``); places the batch (``_placed``); runs the program; and rebuilds
the user's state around its arrays (``_finished``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh

from zerojax.collectives.ledger import Ledger
from zerojax.collectives.residuals import names
from zerojax.devices.mesh import automatic_context, relabel_arrays
from zerojax.distributed import log
from zerojax.foresight.guard import Guard
from zerojax.monitor.after_step import AfterStep
from zerojax.optim.wrap import ZeroOptState
from zerojax.placement.states import States
from zerojax.plan.places import offloads
from zerojax.quantize import check_trainable
from zerojax.step.arguments import Arguments
from zerojax.step.call import Call
from zerojax.step.collectives_table import CollectivesTable
from zerojax.step.decorated import Decorated, P, R, check_concrete, check_not_deleted
from zerojax.step.find_optimizer import find_optimizer
from zerojax.step.jitted import Slot
from zerojax.step.last import Continue, LastState
from zerojax.step.offloaded import OffloadedStep
from zerojax.step.program import StepProgram, StepResult, StepSetting
from zerojax.step.resident import ResidentStep
from zerojax.trace.explicit import Explicit
from zerojax.train_state.nnx import from_cached_partial
from zerojax.train_state.results import beside, put_back
from zerojax.train_state.state_parts import FlatParts, OpenedState, Parts
from zerojax.xla import compat, jaxprs
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree


class _Start(NamedTuple):
    """The start of a call: the program; the arrays of the state, placed for the program; and, if
    the last step left the state, the function that continues with it."""

    program: StepProgram
    flat: FlatParts
    after: Continue | None = None


class Step(Decorated[P, R]):
    """A decorated step, created by ``@zero`` and called like the function that it decorates.

    Args:
      arguments: The arguments of the function, which returns the new state among its results (a
        flax ``TrainState`` or other pytrees), or is ``(model, optimizer, batch, ...) -> anything``
        with NNX objects in any order, updated in place.
      states: Turns a user's states into sharded states.
      donate: Whether to reuse the memory of the state that is passed in.
      guard: Checks that a step fits the devices' memory, before its first run; None skips the
        check.

    """

    def __init__(
        self, arguments: Arguments, states: States, donate: bool, guard: Guard | None
    ) -> None:
        super().__init__(arguments, states)
        self._donate, self._guard = donate, guard
        self._after_step = AfterStep(states.config)
        self._last: tuple[LastState, StepProgram] | None = None
        self._numbers: tuple[StepSetting, Sequence[Any]] | None = None

    @property
    def zero_state(self) -> ZeroOptState | None:
        """zerojax's counters and telemetry after the last step, without the optimizer's state, for
        :func:`zerojax.telemetry`; None before the first step."""
        return None if self._numbers is None else self._numbers[0].zero_state(self._numbers[1])

    @compat.with_short_traceback
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given = self._arguments.by_slot(args, kwargs)
        found = self._find_last(given)
        left = None if found is None else found.program.setting.body.function
        call = self._arguments.sort(given, left)
        watchdog = self._watchdog
        if not call.known.checked:
            check_concrete(self._arguments.name, call.batch)
        self._agree(call, "..." if found else "a state from elsewhere, ...")
        mesh = self._states.mesh
        types = jax.sharding.get_abstract_mesh().axis_types
        with automatic_context(mesh) as names:
            explicit = Explicit.of(names, call.batch)
            if explicit:
                call = self._relabelled(call)
            if found is None or not found.program.setting.serves(call.signature, explicit):
                found = self._begin(call, explicit)
            elif found.program.setting.kind.write_back is not None:
                from_cached_partial()
            call, batch = self._placed(found, call, explicit)
            program, parts = found.program, found.flat.parts
            # Before it runs: processes with unequal programs would wait for each other.
            self._compare(program, call, lambda: program.lowered(parts(), call.batch, call.further))
            if self._guard is not None and not program.fits:
                self._check_memory(self._guard, program, call, parts(), batch)
                program.fits = True
            result = program(found.flat, batch, call.further)
            objects = self._finished(found, call, self._after_step.phase("step", result))
            call.known.checked = self._is_alone and explicit is None
        out = result.out
        if watchdog:
            watchdog.ran(out)
        self._limit_in_flight(out, self._numbers)
        if explicit:
            out = relabel_arrays(out, Mesh(mesh.devices, mesh.axis_names, axis_types=types))
        return put_back(out, objects)  # type: ignore[no-any-return]

    def _find_last(self, given: Mapping[Slot, PyTree]) -> _Start | None:
        """Returns the start of a call that continues from the state that the last step left, which
        needs no further checks; None for another call."""
        if self._last is None:
            return None
        last, program = self._last
        slots = program.setting.body.function.signature.state
        if any(slot not in given for slot in slots):
            return None
        found = last.find(tuple([given[slot] for slot in slots]))
        return None if found is None else _Start(program, *found)

    def _placed(self, start: _Start, call: Call, explicit: Explicit | None) -> tuple[Call, PyTree]:
        """Checks the arguments beside the state; returns the call with arrays that the program may
        read although it takes over the state's memory, and the batch on the devices."""
        setting, leaves, known = start.program.setting, start.flat.leaves, call.known
        plain, layout = self._is_alone and explicit is None, start.program.setting.layout
        is_checked = plain and known.checked
        call = call._replace(further=setting.with_specs(call.further))
        if not is_checked:
            layout.check(call.batch)
        # A step takes over a state as a whole: two arrays tell, at no cost for each leaf.
        check_not_deleted((leaves[0], leaves[-1]))
        self._after_step.check()
        is_placed = is_checked and known.placed
        batch = call.batch if is_placed else layout.place(call.batch)
        batch = self._after_step.phase("batch", batch)
        if plain and not is_checked:
            # place returns an array itself if nothing moves.
            known.placed = all(map(operator.is_, *map(jax.tree.leaves, (batch, call.batch))))
        if self._donate:
            batch, further = _copy_state_arrays(start.flat, (batch, call.further))
            call = call._replace(further=further)
        if not is_checked:
            layout.check_more(call)
        return call, batch

    def _finished(self, start: _Start, call: Call, result: StepResult) -> tuple[PyTree, ...]:
        """Returns the state's objects with the arrays after a step, NNX objects updated in place;
        records the state, by which the next call recognizes it, and the step's figures."""
        check_concrete(self._arguments.name, result.flat.leaves[0])
        setting, flat, after_step = start.program.setting, result.flat, self._after_step
        kind = setting.kind
        self._numbers = setting, setting.numbers(flat)
        objects = None if start.after is None else start.after(flat)
        if objects is None:
            parts, own = flat.parts(), {}
            if kind.write_back is None:
                objects = kind.close(parts, setting.tx)
            else:
                objects = call.objects
                kind.write_back(objects, parts, setting.tx)
            if kind.any_pytree:
                own["step"] = parts.step
                if not kind.knows_parameters:
                    own["opt_state"] = parts.opt_state
            last = LastState.of(objects, flat, own)
            self._last = None if last is None else (last, start.program)
        if kind.any_pytree:
            # Nothing else shows that zerojax created these arrays, which a step may donate.
            owned = self._states.owned
            if self._last is None:
                owned.add(flat.leaves)
            else:
                owned.extend(self._last[0].references)
        setting.body.function.bring_up_to_date(call)
        after_step.note(result.signals)
        if after_step.logs:
            rows = setting.layout.rows(call.batch)
            after_step.record(result.signals, beside(result.out), rows)
        return objects

    def _begin(self, call: Call, explicit: Explicit | None) -> _Start:
        """Opens, checks and places the state of a call, and returns the start of the call."""
        cached = from_cached_partial()
        check_concrete(self._arguments.name, call.objects)
        opened = self._states.open(call.objects)
        check_trainable(self._arguments.name, opened.parts.params)
        if opened.kind.write_back is not None and cached and opened.plain:
            raise ValueError(
                "nnx.cached_partial keeps a copy of the optimizer, which the first step would "
                "replace. Create both with (model, optimizer) = zero.init(create)."
            )
        check_not_deleted(jax.tree.leaves(call.objects) if opened.kind.any_pytree else ())
        program = self._program(opened, call, explicit)
        program.setting.layout.check(call.batch)
        parts = self._states.state_placer(program.setting.plan).donatable(opened)
        check_concrete(self._arguments.name, parts.step)
        return _Start(program, FlatParts.of(parts))

    def _program(self, opened: OpenedState, call: Call, explicit: Explicit | None) -> StepProgram:
        make = functools.partial(self._make, opened, call, explicit)
        return self._compiled(opened, call.signature, explicit, make)

    def _make(self, opened: OpenedState, call: Call, explicit: Explicit | None) -> StepProgram:
        """Creates the program for a call."""
        function = self._arguments.rearranged(call.signature)
        if not call.signature.batch:
            self._states.warn_once(
                f"{self._arguments.name} takes no batch, so that each device computes all of it. "
                "If an argument that it returns is the batch, name it with batch_argnums"
            )
        if opened.kind.optimizer_in_step:
            opened = dataclasses.replace(opened, tx=find_optimizer(function, opened, call))
        setting = StepSetting(function, self._states, opened, explicit)
        kind = OffloadedStep if offloads(self._states.config) else ResidentStep
        return kind(setting, self._donate, self._after_step.signals)

    def _check_memory(
        self, guard: Guard, program: StepProgram, call: Call, parts: Parts, batch: PyTree
    ) -> None:
        like = program.setting.layout.shapes(call.batch)
        batch_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(batch))
        jax.block_until_ready(parts)  # the program that computed them has freed its memory
        saves = guard.check(
            lambda: program.lowered(parts, like, call.further),
            program.setting.plan,
            batch_bytes,
            program.setting.body.function,
            call.objects,
            like,
            call.further,
        )
        if saves:
            log.warning(
                "the step fits into memory only because XLA computes values again, which takes "
                "time. Use jax.checkpoint (nn.remat) or a smaller micro-batch; `zerojax fit` finds "
                "the faster one."
            )
            program.save_memory()

    def _with(self, arguments: Arguments) -> Self:
        return type(self)(arguments, self._states, self._donate, self._guard)

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Writes further figures, such as an evaluation's, to the config's monitors.

        The figures follow those of all earlier steps, for which this call waits: wandb drops
        figures of fewer samples than it has seen.

        Args:
          figures: Numbers by tag, such as ``Eval/Samples/loss``.
          samples: The number of global samples seen, the x-axis.
        """
        self._after_step.write(figures, samples)

    def flush(self) -> None:
        """Writes the remaining logs, and checks whether the last steps were finite. Files and
        wandb's run stay open."""
        self._after_step.flush()

    def close(self) -> None:
        """Flushes, and closes the logs, as the end of the program does. Steps may follow; wandb has
        them in a new run."""
        self._after_step.close()

    def programs(self, *args: PyTree, **kwargs: PyTree) -> Iterator[LoweredProgram]:
        """Lowers every program of the step; :meth:`lower` returns the first.

        A step is one program, named "step", unless something is offloaded. Under offload,
        "gradients" runs the body, and each of the others streams sub-groups of the state through
        the device.
        """
        with self._checked(args, kwargs, self._program) as (program, parts, call):
            yield from program.lowered(parts, call.batch, call.further)

    @compat.with_short_traceback
    def collectives(self, *args: PyTree, **kwargs: PyTree) -> CollectivesTable:
        """Returns the collectives that zerojax requests for a step, without compiling the step.

        Args:
          *args, **kwargs: The step's arguments, abstract or concrete, as for :meth:`lower`.

        Returns:
          A row for each all-gather, reduce-scatter, all-reduce and all-to-all: the array, its shape
          and dtype, the bytes that a device sends, the runs per step, the place, the reason, and
          the line of your program that causes the collective. ``str()`` gives a text table. Sums
          over the rows of the batch that the step itself computes (the loss, metrics, batch
          statistics) are not listed; nor is the update of an offloaded state.

        Example:
          >>> import jax, jax.numpy as jnp, optax, zerojax
          >>> from flax.training.train_state import TrainState
          >>> zero = zerojax.zero(stage=3, bf16=True)
          >>> @zero
          ... def train_step(state, batch):
          ...     loss = lambda params: jnp.mean((batch @ params["w"]) ** 2)
          ...     return state.apply_gradients(grads=jax.grad(loss)(state.params))
          >>> state = zero.abstract_state(lambda: TrainState.create(
          ...     apply_fn=None, params={"w": jnp.ones((512, 256))}, tx=optax.adam(1e-3)))
          >>> table = train_step.collectives(state, jax.ShapeDtypeStruct((8, 512), jnp.float32))
          >>> for row in table.rows:
          ...     print(row.kind, row.array, row.dtype, row.bytes, row.times, row.where)
          all-gather params['w'] bfloat16 229376 1 use
          reduce-scatter params['w'] float32 458752 1 produced
          all-reduce  float32 7 1 update
        """
        # A program that no call shares, because its ledger is read.
        with self._checked(args, kwargs, self._make) as (program, parts, call):
            inserter = program.setting.inserter
            inserter.ledger = Ledger(inserter.mesh, asked=True)
            program.traced(parts, call.batch, call.further)
            paths = [leaf.path for leaf in program.setting.plan.compute]
        return CollectivesTable.of(self._arguments.name, inserter.ledger.decisions, paths)

    def recomputed_names(self, *args: PyTree, **kwargs: PyTree) -> list[str]:
        """Returns the names, by ``jax.ad_checkpoint.checkpoint_name``, of values that
        rematerialised blocks compute again, for abstract or concrete arguments."""
        with self._checked(args, kwargs, self._program) as (program, parts, call):
            traced = program.traced(parts, call.batch, call.further)
        return names(jaxprs.open_jaxpr(traced.jaxpr)[0])

    @contextlib.contextmanager
    def _checked(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        make: Callable[[OpenedState, Call, Explicit | None], StepProgram],
    ) -> Iterator[tuple[StepProgram, Parts, Call]]:
        """Yields the program for these arguments, abstract or concrete; the state's parts; and the
        sorted arguments."""
        call = self._arguments.sort(self._arguments.by_slot(args, kwargs))
        with automatic_context(self._states.mesh) as names:
            explicit = Explicit.of(names, call.batch)
            opened = self._states.open(call.objects)
            program = make(opened, call, explicit)
            program.setting.layout.check(call.batch)
            program.setting.layout.check_more(call)
            further = program.setting.with_specs(call.further)
            yield program, opened.parts, call._replace(further=further)


def _copy_state_arrays(flat: FlatParts, given: PyTree) -> PyTree:
    """Copies the further arguments that are arrays of the state, because the step takes over the
    state's memory."""
    given_ids = {*map(id, jax.tree.leaves(given))}
    if given_ids.isdisjoint(map(id, flat.leaves)):
        return given
    shared = given_ids.intersection(map(id, flat.leaves))
    return jax.tree.map(lambda x: x.copy() if id(x) in shared else x, given)
