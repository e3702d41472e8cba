"""The decorator: what happens in a step, from top to bottom."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.accumulation.roles import roles_of
from zerojax.accumulation.run import MicroBatches, rows_together
from zerojax.collectives import Inserter
from zerojax.config import ZeroConfig
from zerojax.devices.mesh import automatic_context, relabelled
from zerojax.foresight.guard import Guard
from zerojax.monitor.after_step import AfterStep, Signals
from zerojax.offload.activations import smallest_away
from zerojax.optim.wrap import ZeroOptState, choose
from zerojax.placement.states import States, abstract
from zerojax.plan.places import check_memories, offloads, reaches_host
from zerojax.plan.plan import DTYPES
from zerojax.step.arguments import Arguments, is_train_state
from zerojax.step.batch import BatchLayout
from zerojax.step.body import (
    Alone,
    Body,
    View,
    advancing,
    cast,
    constrainer,
    params_after,
    updating,
)
from zerojax.step.call import Call, Form, Rearranged, returned
from zerojax.step.entering import entering
from zerojax.step.last import LastObjects, LastState
from zerojax.step.offloaded import Streamed
from zerojax.step.static_arguments import Static, divide, join
from zerojax.trace.explicit import Explicit, Types
from zerojax.trace.loss_scaling import replacements
from zerojax.train_state.nnx import apply_settings, from_cached_partial, is_nnx
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla import compat
from zerojax.xla.compiler import options
from zerojax.xla.lowered import LoweredProgram


class Program:
    """The compiled step for one kind of state.

    Attributes:
      checked: it is known to fit.
    """

    checked = False

    def __init__(
        self,
        function: Rearranged,
        states: States,
        opened: OpenedState,
        donate: bool,
        signals: Callable[[ZeroOptState, Any], Signals],
        explicit: Explicit | None,
    ) -> None:
        self.function, self.signals = function, signals
        config, axis = states.config, states.axis
        sizes = config.batch(states.mesh.shape[axis])
        self.config, self.accumulation = config, sizes.accumulation
        self.compute_dtype = DTYPES[config.compute_dtype]
        self.tx, self.split, self.close = opened.tx, opened.split, opened.close
        self.write_back = opened.write_back
        self.plan = states.plan(opened)
        mesh = self.plan.lowering_mesh
        self.layout = BatchLayout(mesh, axis, sizes)
        types = Types(self.plan, explicit) if explicit else None
        self.body = Body(function, opened, _once(config, sizes.accumulation), types)
        self.inserter = Inserter(mesh, axis, keep=config.stage < 3, away=smallest_away(config))
        shardings = self.plan.shardings()
        self.to_shards = constrainer(shardings.params)
        way, one_pass = self.tx.one_pass, None
        if way is not None and way.wins(self.plan.mesh):
            one_pass = functools.partial(way.update, shardings=shardings.params)
        self.advance = advancing(self.tx, one_pass)
        self.jitted = jax.jit(
            self._step,
            static_argnums=3,
            donate_argnums=(0,) if donate else (),
            out_shardings=(shardings, None, None),
            compiler_options=options(self.plan.mesh),
        )

    def _step(
        self, parts: Parts, batch: Any, arrays: list[Any], static: Static
    ) -> tuple[Parts, Any, Signals]:
        compute, view = parts.params, View(opt=parts.opt_state)
        if self.compute_dtype is not None:
            compute = self.to_shards(cast(parts.params, self.compute_dtype))
            view = View(opt=parts.opt_state, masters=parts.params, compute=compute)
            batch = cast(batch, self.compute_dtype) if self.config.auto_cast else batch
        start = parts._replace(params=compute, opt_state=view)
        args, kwargs = join(arrays, static)
        tx = updating(self.advance, self.to_shards)
        shards = entering(self.inserter, jax.tree.leaves(compute), self.plan.compute)
        made, out = self._evaluate(
            lambda p, b: self.body(p, tx, b, args, kwargs), start, batch, shards
        )
        after: View = made.opt_state
        done = None
        rest = made.rest
        if self.config.skips_overflow:
            done = after.opt.skipped == parts.opt_state.skipped
            rest = choose(done, rest, parts.rest)
        params = params_after(after, made.params, parts.params, done)
        made = made._replace(params=params, opt_state=after.opt, rest=rest)
        return made, out, self.signals(made.opt_state, out)

    def _evaluate(
        self, body: Callable[..., Any], start: Parts, batch: Any, params: list[Any]
    ) -> tuple[Parts, Any]:
        """Runs the body with each parameter made whole where the stage has it."""
        k = self.accumulation
        trace = functools.partial(self.body.trace, body, start)
        closed, shape = trace(batch if k == 1 else rows_together(batch))
        self.body.check(compat.open_jaxpr(closed)[0], len(self.plan.leaves["params"]))
        replace = replacements(closed, start.opt_state.opt.loss_scale)
        others = jax.tree.leaves((start._replace(params=None), batch))
        if k == 1:
            outs = self.inserter(closed, [*params, *others], replace)
        else:
            outs = MicroBatches(
                trace,
                closed,
                batch,
                roles_of(self.body.name, start, batch, shape),
                k,
                self.inserter,
                sharded=self.config.stage >= 2,
                dtype=DTYPES[self.config.grad_accum_dtype],
            )([*params, *others], replace)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    def __call__(
        self, parts: Parts, batch: Any, args: Any, kwargs: Any
    ) -> tuple[Parts, Any, Signals]:
        arrays, static = divide(args, kwargs)
        return self.jitted(parts, batch, arrays, static)

    def lower(self, parts: Parts, batch: Any, args: Any, kwargs: Any) -> jax.stages.Lowered:
        arrays, static = divide(args, kwargs)
        parts = abstract(parts, self.plan)
        traced = self.jitted.trace(parts, self.layout.abstract(batch), arrays, static)
        if reaches_host(self.config):
            return compat.lower_for(traced, self.plan.mesh)
        return traced.lower()

    def lowered(self, parts: Parts, batch: Any, args: Any, kwargs: Any) -> Iterator[LoweredProgram]:
        """All programs, of which there is one."""
        yield LoweredProgram("step", self.lower(parts, batch, args, kwargs))


class Last(NamedTuple):
    """The last step: what it left, how it was called, and the program that ran."""

    left: LastState | LastObjects
    form: Form
    explicit: Explicit | None
    program: Program | Streamed


class Step:
    """A decorated step, made by ``@zero``; call it as the function it decorates.

    Args:
      arguments: of the function ``(state, batch, ...) -> (state, anything)``, or the state alone,
        with a flax ``TrainState``; or ``(model, optimizer, batch, ...) -> anything`` with NNX
        objects in any order, updated in place.
      states: what the config makes of a state.
      donate: reuse the memory of the state that is passed in.
      guard: looks whether it fits, before it runs for the first time.
    """

    def __init__(self, arguments: Arguments, states: States, donate: bool, guard: Guard) -> None:
        functools.update_wrapper(self, arguments.function)
        self._arguments, self._attribute = arguments, arguments.name
        self._states, self._donate, self._guard = states, donate, guard
        self._after_step = AfterStep(states.config)
        self._programs: dict[Any, Program | Streamed] = {}
        self._last: Last | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._arguments.sort(args, kwargs)
        _check_concrete(self._arguments.name, call.batch)
        mesh = self._states.mesh
        types = jax.sharding.get_abstract_mesh().axis_types
        with automatic_context(mesh) as names:
            explicit = Explicit.of(names, call.batch)
            if explicit:
                batch, more = relabelled((call.batch, (call.args, call.kwargs)), mesh)
                call = call._replace(batch=batch, args=more[0], kwargs=more[1])
            state, out = self._run(call, explicit)
        if explicit:
            out = relabelled(out, Mesh(mesh.devices, mesh.axis_names, axis_types=types))
        if state is None:  # NNX: updated in place
            return out
        return state if isinstance(out, Alone) else (state, out)

    def _run(self, call: Call, explicit: Explicit | None) -> tuple[Any, Any]:
        """The state after the step, None for NNX objects, and what else it returns."""
        cached = from_cached_partial()
        last, found = self._last, None
        if last is not None and last[1:3] == (call.form, explicit):
            found = last.left.found(call.objects)
        if last is not None and found is not None:
            program = last.program  # it came from here: nothing else to check
            parts = found.parts
        else:
            _check_concrete(self._arguments.name, call.objects)
            opened = self._states.open(call.objects)
            if opened.write_back is not None and cached and opened.plain:
                raise ValueError(
                    "nnx.cached_partial holds a copy of the optimizer, which the first step would "
                    "replace: make them with zero.init, (model, optimizer) = zero.init(create)."
                )
            program = self._program(opened, call.form, explicit)
            program.layout.check(call.batch)
            parts = self._states.placed(opened, program.plan)
        _check_concrete(self._arguments.name, parts.step)
        _check_alive(parts.step)
        after_step = self._after_step
        after_step.check()
        placed = after_step.phase("batch", program.layout.place(call.batch))
        program.layout.check_more(call.args, call.kwargs, program.layout.rows(call.batch))
        if not program.checked:
            self._check_memory(program, call, parts, placed)
            program.checked = True
        parts, out, signals = after_step.phase(
            "step", program(parts, placed, call.args, call.kwargs)
        )
        _check_concrete(self._arguments.name, parts.step)
        state, result = None, out
        left: LastState | LastObjects | None
        if program.write_back is not None:
            if found is not None and found.write_back is not None:
                found.write_back(parts)
            else:
                program.write_back(call.objects, parts, program.tx)
            changed = program.function.changed
            if any(changed.values()):
                apply_settings(call.objects, changed[divide(call.args, call.kwargs)[1]])
            result = returned(out, call.objects)
            left = LastObjects.of(call.objects, parts) if found is None else None
        else:
            state = program.close(parts, program.tx)
            left = LastState(state, program.split)
        if left is not None:
            self._last = Last(left, call.form, explicit, program)
        after_step.note(signals, out, program.layout.rows(call.batch))
        return state, result

    def __set_name__(self, owner: Any, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The step of an instance, where the function is defined in a class. What it reads of
        ``self`` is part of the program, unless ``self`` is the state."""
        if instance is None:
            return self
        if is_nnx(instance) or is_train_state(instance):
            return functools.partial(self, instance)
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"{self._attribute} is a step in {type(instance).__name__}, whose instances have "
                "__slots__ alone: decorate the bound method of an instance instead."
            )
        kept = vars(instance).get(self._attribute)  # python looks here first, but for odd names
        if not isinstance(kept, Step):
            bound = self._arguments.bound(instance)
            kept = Step(bound, self._states, self._donate, self._guard)
            vars(instance)[self._attribute] = kept
        return kept

    def _check_memory(
        self, program: Program | Streamed, call: Call, parts: Any, placed: Any
    ) -> None:
        like = jax.tree.map(
            lambda x, y: jax.ShapeDtypeStruct(np.shape(x), y.dtype), call.batch, placed
        )
        rows = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
        jax.block_until_ready(parts)  # what made them has let go of its memory
        self._guard.check(
            lambda: program.lowered(parts, like, call.args, call.kwargs),
            program.plan,
            rows,
            program.function,
            call.objects,
            like,
            call.args,
            call.kwargs,
        )

    def close(self) -> None:
        """Writes the logs that are left, as the end of the program does, and looks whether the
        last steps were finite. Steps may follow."""
        self._after_step.close()

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for abstract (or concrete) arguments, as ``jax.jit(f).lower`` does.

        Works for a mesh of devices that are not there (:func:`zerojax.topology`).
        """
        call = self._arguments.sort(args, kwargs)
        with automatic_context(self._states.mesh) as names:
            explicit = Explicit.of(names, call.batch)
            opened = self._states.open(call.objects)
            program = self._program(opened, call.form, explicit)
            program.layout.check(call.batch)
            program.layout.check_more(call.args, call.kwargs, program.layout.rows(call.batch))
            return program.lower(opened.parts, call.batch, call.args, call.kwargs)

    def programs(self, *args: Any, **kwargs: Any) -> Iterator[LoweredProgram]:
        """Every program of the step, lowered; :meth:`lower` gives the first.

        A step is one program, called "step", unless something is offloaded. Then "gradients" runs
        the body, and each of the others takes sub-groups of the state through the device.
        """
        call = self._arguments.sort(args, kwargs)
        with automatic_context(self._states.mesh) as names:
            explicit = Explicit.of(names, call.batch)
            opened = self._states.open(call.objects)
            program = self._program(opened, call.form, explicit)
            yield from program.lowered(opened.parts, call.batch, call.args, call.kwargs)

    def _program(
        self, opened: OpenedState, form: Form, explicit: Explicit | None
    ) -> Program | Streamed:
        leaves, tree = jax.tree.flatten(opened.parts)
        shapes = tuple((np.shape(x), getattr(x, "dtype", None)) for x in leaves)
        key = opened.key, opened.tx, tree, shapes, opened.specs, form, explicit
        if key not in self._programs:
            check_memories(self._states.config, self._states.mesh)
            made = Streamed if offloads(self._states.config) else Program
            function = self._arguments.rearranged(form)
            self._programs[key] = made(
                function, self._states, opened, self._donate, self._after_step.signals, explicit
            )
        return self._programs[key]


def _check_concrete(name: str, tree: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{name} is decorated with zero, and was called inside jax.jit, scan, vmap, grad or "
            "eval_shape: it is compiled as a whole, places its state and cannot be part of another "
            "program. Call it in a plain Python loop; what is to be compiled with it goes into "
            "its body, and shapes come from its lower()."
        )


def _check_alive(step: jax.Array) -> None:
    if step.is_deleted():
        raise ValueError(
            "this state was passed to an earlier step, which took over its memory: go on with the "
            "state that the step returned, or keep both with zerojax.zero(..., donate=False)."
        )


def _once(config: ZeroConfig, accumulation: int) -> str:
    """Why a step may update only once, with the remedy; empty where it may more often."""
    if accumulation > 1:
        return (
            f"accumulated over {accumulation} micro-batches: update once, or set "
            "gradient_accumulation_steps to 1"
        )
    return "unscaled by one loss scale: update once, or use bf16" if config.fp16 else ""
