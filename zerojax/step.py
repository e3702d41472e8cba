"""The decorator: what happens in a step, from top to bottom."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from zerojax import compat
from zerojax import nnx as nnx_state
from zerojax.accumulate import Evaluate, accumulate
from zerojax.batch import BatchLayout
from zerojax.body import (
    Body,
    View,
    advancing,
    cast,
    collecting,
    constrainer,
    params_after,
    updating,
)
from zerojax.collectives import Inserter, Shard, layout
from zerojax.compiler import options
from zerojax.config import ZeroConfig
from zerojax.explicit import Explicit, Types
from zerojax.extras import Static, divide, join
from zerojax.foresight.guard import Guard
from zerojax.found import Found
from zerojax.lowered import LoweredProgram
from zerojax.mesh import automatic_context, relabelled
from zerojax.offload.activations import smallest_away
from zerojax.offload.places import check_memories, offloads, reaches_host
from zerojax.optim.wrap import ZeroOptState, choose
from zerojax.parts import Opened, Parts
from zerojax.plan import DTYPES
from zerojax.state import States, abstract
from zerojax.streamed import Streamed
from zerojax.watch import Signals, Watch


class Program:
    """The compiled step for one kind of state.

    Attributes:
      checked: it is known to fit.
    """

    checked = False

    def __init__(
        self,
        function: Callable[..., Any],
        states: States,
        opened: Opened,
        donate: bool,
        signals: Callable[[ZeroOptState], Signals],
        explicit: Explicit | None,
    ) -> None:
        self.signals = signals
        config, axis = states.config, states.axis
        sizes = config.batch(states.mesh.shape[axis])
        self.config, self.accumulation = config, sizes.accumulation
        self.compute_dtype = DTYPES[config.compute_dtype]
        self.tx, self.split, self.close = opened.tx, opened.split, opened.close
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
        self.to_kept = constrainer(self.plan.on_device(self.plan.grads))
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
        gathered = self._gathered(compute)
        args, kwargs = join(arrays, static)

        def running(tx: Any) -> Evaluate:
            return lambda parts, batch: self._evaluate(
                lambda p, b: self.body(p, tx, b, args, kwargs), gathered, parts, batch
            )

        if self.accumulation == 1:
            tx = updating(self.advance, self.to_shards)
            made, out, _ = running(tx)(start, batch)
        else:
            tx = collecting(self.to_kept)
            made, out = accumulate(
                running(tx),
                start,
                batch,
                self.advance,
                sharded=self.to_shards,
                kept=self.to_kept,
                dtype=DTYPES[self.config.grad_accum_dtype],
            )
        after: View = made.opt_state
        done = None
        rest = made.rest
        if self.config.skips_overflow:
            done = after.opt.skipped == parts.opt_state.skipped
            rest = choose(done, rest, parts.rest)
        params = params_after(after, made.params, parts.params, done)
        made = made._replace(params=params, opt_state=after.opt, rest=rest)
        return made, out, self.signals(made.opt_state)

    def _gathered(self, params: Any) -> list[Any]:
        """Stages 1 and 2: the compute parameters gathered, once a step; else a None for each."""
        leaves = self.plan.leaves["params"]
        if not self.inserter.keep:
            return [None] * len(leaves)
        return [
            self.inserter.whole(x, layout.full(leaf.spec, x.ndim)) if leaf.sharded else None
            for x, leaf in zip(jax.tree.leaves(params), leaves, strict=True)
        ]

    def _evaluate(
        self, body: Callable[..., Any], gathered: list[Any], parts: Parts, batch: Any
    ) -> tuple[Parts, Any, jax.Array | None]:
        """Runs the body with each parameter made whole where the stage has it.

        Returns:
          The state, the step's results, and the weight that the loss reports, if any.
        """
        closed, shape = self.body.trace(body, parts, batch)
        self.body.check(compat.open_jaxpr(closed)[0], len(self.plan.leaves["params"]))
        leaves = zip(
            jax.tree.leaves(parts.params), self.plan.leaves["params"], gathered, strict=True
        )
        params = [
            Shard(x, layout.full(leaf.spec, x.ndim), whole) if leaf.sharded else x
            for x, leaf, whole in leaves
        ]
        others = jax.tree.leaves((parts._replace(params=None), batch))
        found = Found(closed, parts.opt_state.opt.loss_scale, self.accumulation > 1)
        outs = self.inserter(closed, [*params, *others], found.replacements())
        return *jax.tree.unflatten(jax.tree.structure(shape), outs), found.weight

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


class Step:
    """A decorated step, made by ``@zero``; call it as the function it decorates.

    Args:
      function: ``(state, batch, ...) -> (state, anything)`` with a flax ``TrainState``, or
        ``(model, optimizer, batch, ...) -> anything`` with NNX objects updated in place.
      states: what the config makes of a state.
      donate: reuse the memory of the state that is passed in.
      guard: looks whether it fits, before it runs for the first time.
    """

    def __init__(
        self, function: Callable[..., Any], states: States, donate: bool, guard: Guard
    ) -> None:
        functools.update_wrapper(self, function)
        self._name = getattr(function, "__name__", "the step")
        # A step that is jitted already is traced as what it was before.
        self._function = getattr(function, "__wrapped__", function)
        self._states, self._donate, self._guard = states, donate, guard
        self._watch = Watch(states.config)
        self._programs: dict[Any, Program | Streamed] = {}
        self._last: tuple[Any, Program | Streamed, Explicit | None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        objects, *others = self._arguments(args, kwargs)
        mesh = self._states.mesh
        types = jax.sharding.get_abstract_mesh().axis_types
        with automatic_context(mesh) as names:
            explicit = Explicit.of(names, others[0])
            if explicit:
                others = relabelled(others, mesh)
            returned = self._run(explicit, objects, *others)
        if not explicit:
            return returned
        given = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        if len(objects) == 2:
            return relabelled(returned, given)
        return returned[0], relabelled(returned[1], given)

    def _run(
        self, explicit: Explicit | None, objects: Any, batch: Any, args: Any, kwargs: Any
    ) -> Any:
        if self._last is not None and self._last[0]() is objects[0] and self._last[2] == explicit:
            program = self._last[1]  # it came from here: nothing else to check
            parts = program.split(*objects)
        else:
            opened = self._states.open(objects)
            program = self._program(opened, explicit)
            program.layout.check(batch)
            parts = self._states.placed(opened, program.plan)
        _check_alive(parts.step)
        watch = self._watch
        watch.check()
        placed = watch.phase("batch", program.layout.place(batch))
        if not program.checked:
            self._check_memory(program, objects, parts, batch, placed, args, kwargs)
            program.checked = True
        parts, out, signals = watch.phase("step", program(parts, placed, args, kwargs))
        if len(objects) == 2:
            nnx_state.update(objects[0], objects[1], parts, program.tx)
            returned = out
        else:
            state = program.close(parts, program.tx)
            self._last = weakref.ref(state), program, explicit
            returned = state, out
        watch.note(signals, out, program.layout.rows(batch))
        return returned

    def _check_memory(
        self,
        program: Program | Streamed,
        objects: Any,
        parts: Parts,
        batch: Any,
        placed: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        like = jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(np.shape(x), y.dtype), batch, placed)
        rows = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
        jax.block_until_ready(parts)  # what made them has let go of its memory
        self._guard.check(
            lambda: program.lowered(parts, like, args, kwargs),
            program.plan,
            rows,
            self._function,
            objects,
            like,
            args,
            kwargs,
        )

    def close(self) -> None:
        """Writes the logs that are left, as the end of the program does. Steps may follow."""
        self._watch.close()

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for abstract (or concrete) arguments, as ``jax.jit(f).lower`` does.

        Works for a mesh of devices that are not there (:func:`zerojax.topology`).
        """
        objects, batch, args, kwargs = self._arguments(args, kwargs)
        with automatic_context(self._states.mesh) as names:
            explicit = Explicit.of(names, batch)
            opened = self._states.open(objects)
            return self._program(opened, explicit).lower(opened.parts, batch, args, kwargs)

    def programs(self, *args: Any, **kwargs: Any) -> Iterator[LoweredProgram]:
        """Every program of the step, lowered; :meth:`lower` gives the first.

        A step is one program, called "step", unless something is offloaded. Then "gradients" runs
        the body, and each of the others takes sub-groups of the state through the device.
        """
        objects, batch, args, kwargs = self._arguments(args, kwargs)
        with automatic_context(self._states.mesh) as names:
            explicit = Explicit.of(names, batch)
            opened = self._states.open(objects)
            found = self._program(opened, explicit).lowered(opened.parts, batch, args, kwargs)
            yield from found

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, Any, Any]:
        """The state (or model and optimizer), the batch, and what else was passed."""
        n = 2 if args and isinstance(args[0], nnx.Module) else 1
        if len(args) <= n:
            bound = inspect.signature(self._function).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if len(args) <= n:
            raise TypeError(
                f"{self._name} takes (state, batch, ...) or (model, optimizer, batch, ...), "
                f"but was called with {len(args)} arguments."
            )
        return args[:n], args[n], args[n + 1 :], kwargs

    def _program(self, opened: Opened, explicit: Explicit | None) -> Program | Streamed:
        leaves, tree = jax.tree.flatten(opened.parts)
        shapes = tuple((np.shape(x), getattr(x, "dtype", None)) for x in leaves)
        key = opened.key, opened.tx, tree, shapes, opened.specs, explicit
        if key not in self._programs:
            check_memories(self._states.config, self._states.mesh)
            made = Streamed if offloads(self._states.config) else Program
            self._programs[key] = made(
                self._function, self._states, opened, self._donate, self._watch.signals, explicit
            )
        return self._programs[key]


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
