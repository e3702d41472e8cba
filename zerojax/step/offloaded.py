"""A step whose state is stored partly in host memory or on disk: several programs in turn.

1. The gradients: the user's step with an optimizer that only collects them.
2. The update, sub-group by sub-group (:mod:`zerojax.step.optimizer_update`), unless the gradients
   overflowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.collectives.host import Unpadded
from zerojax.monitor.after_step import Signals
from zerojax.offload.disk_params import ParamReader, beside_disk
from zerojax.optim.wrap import ZeroOptState
from zerojax.placement.states import abstract
from zerojax.plan import layout
from zerojax.plan.places import DEVICE, DISK
from zerojax.plan.stored import pad
from zerojax.step.call import Further
from zerojax.step.entering import enter
from zerojax.step.evaluate_body import evaluate_body
from zerojax.step.gradient_sender import GradientSender
from zerojax.step.optimizer_update import OptimizerUpdate
from zerojax.step.program import MakeSignals, StepResult, StepSetting
from zerojax.step.view import View, collecting, constrainer, unless_skipped
from zerojax.train_state.results import beside
from zerojax.train_state.state_parts import FlatParts, Parts
from zerojax.xla import compat
from zerojax.xla.compiler import streaming
from zerojax.xla.garbage import seldom_collected
from zerojax.xla.lowered import BATCH, GRADIENTS, STATE, LoweredProgram, with_argument_names
from zerojax.xla.types import PyTree


class GradientResult(NamedTuple):
    """The results of the program of the gradients.

    Attributes:
      grads: The gradients in the order of the parameters, None if the update does not use one; the
        gradients of parameters that are stored in host memory are sent to host memory, too.
      scalars, shared: See :meth:`OptimizerUpdate.prelude`.
      rest, step, out: Results of the user's step.
      done: bool [], whether the gradients are finite, so that the update is to run; None if every
        update runs.
      signals: See :class:`StepSetting`.
    """

    grads: list[jax.Array | None]
    scalars: list[jax.Array]
    shared: list[jax.Array]
    rest: dict[str, PyTree]
    step: jax.Array
    out: PyTree
    done: jax.Array | None
    signals: Signals


class OffloadedStep:
    """The compiled step, see :class:`zerojax.step.program.StepProgram`.

    The program of the gradients takes :class:`Parts` whose parameters are the compute parameters, a
    list with None for those on disk, which the program reads itself; and whose optimizer state is a
    list of its leaves, with None for the streamed arrays.

    Raises:
      ValueError: ``donate=False`` for a state on disk.
      DiskStateError: In a call, a parameter on the disk differs from the data that was written.
    """

    fits = False

    def __init__(self, setting: StepSetting, donate: bool, signals: MakeSignals) -> None:
        self.setting, self._donate, self._signals, plan = setting, donate, signals, setting.plan
        if not donate and plan.bytes_in(DISK):
            raise ValueError(
                "donate=False cannot keep a state on disk, which a step overwrites. Remove it, or "
                'offload to device "cpu".'
            )
        self._copies = setting.states.placer.copies(plan)
        self.update = OptimizerUpdate(setting, self._copies)
        grads = plan.grads if setting.layout.accumulation > 1 else plan.params
        self._tx = collecting(constrainer(plan.on_device(grads)), self.update.uses)
        self._reader = ParamReader.of(setting.config)
        shardings = plan.shardings()
        # For None, jit leaves a result's sharding to XLA.
        unset: Any = GradientResult._make([None] * len(GradientResult._fields))
        gradients = [plan.sharding(leaf) for leaf in plan.gradients()]
        self._jitted = jax.jit(
            with_argument_names(self._compute_gradients, STATE, BATCH, "further"),
            out_shardings=unset._replace(grads=gradients, rest=shardings.rest, step=shardings.step),
            compiler_options=streaming(plan.mesh, dict(plan.config.xla)),
        )

    def __call__(self, flat: FlatParts, batch: PyTree, further: Further) -> StepResult:
        setting, reader = self.setting, self._reader
        parts = setting.plan.stored(flat).parts()
        params, opt_state = jax.tree.leaves(parts.params), jax.tree.leaves(parts.opt_state)
        compute = self._copies.of(params)
        if reader is not None:
            reader.use(compute)
        result: GradientResult = self._jitted(self._inputs(parts, compute), batch, further)
        del compute
        if reader is not None:
            # Reads and the update's writes share a queue; finish the reads first.
            reader.check((result.grads, result.out))
        opt_state = self.update.with_shared(opt_state, result.shared)
        # The host waits for the gradients here, because it decides on the programs of the update.
        if result.done is None or bool(result.done):
            if not self._donate:
                # The programs of the update donate the arrays that they replace.
                params, opt_state = jax.tree.map(jnp.copy, (params, opt_state))
            params, opt_state = self.update.run(result.grads, params, opt_state, result.scalars)
        if self._donate and parts.step is not result.step:
            parts.step.delete()  # marks the entire state as donated
        after = Parts(
            jax.tree.unflatten(setting.structure.params, params),
            jax.tree.unflatten(setting.structure.opt_state, opt_state),
            result.step,
            result.rest,
        )
        return StepResult(setting.plan.shown(FlatParts.of(after)), result.out, result.signals)

    def save_memory(self) -> None:
        """See :meth:`StepProgram.save_memory`. These programs have XLA's own limit and passes."""

    def traced(self, parts: Parts, batch: PyTree, further: Further) -> jax.stages.Traced:
        """Traces the program of the gradients."""
        parts = abstract(parts, self.setting.plan, at_rest=True)
        inputs = self._inputs(parts, self._copies.abstract())
        return self._jitted.trace(inputs, self.setting.layout.abstract(batch), further)

    def lowered(self, parts: Parts, batch: PyTree, further: Further) -> Iterator[LoweredProgram]:
        """Lowers first the program of the gradients, then the programs of the update."""
        mesh = self.setting.plan.mesh
        with seldom_collected():
            program = compat.lower_for(self.traced(parts, batch, further), mesh)
        yield LoweredProgram(GRADIENTS, program)
        for name, traced, times in self.update.by_groups.traced():
            yield LoweredProgram(name, compat.lower_for(traced, mesh), times)

    def _inputs(self, parts: Parts, params: Sequence[PyTree]) -> Parts:
        """Returns the part of a state that the program of the gradients takes."""
        plan = self.setting.plan
        opt_state = zip(jax.tree.leaves(parts.opt_state), plan.streamed, strict=True)
        return parts._replace(
            params=beside_disk(params, plan.compute),
            opt_state=[None if streamed else x for x, streamed in opt_state],
        )

    @compat.with_large_stack
    @seldom_collected()
    def _compute_gradients(self, parts: Parts, batch: PyTree, further: Further) -> GradientResult:
        """Computes the gradients in the compiled program: the compute parameters enter as shards,
        the body runs with an optimizer that collects gradients, and the prelude of the update
        follows."""
        setting, plan, update = self.setting, self.setting.plan, self.update
        rest = plan.each(plan.unpadded, parts.rest, plan.leaves["rest"])
        opt: ZeroOptState = jax.tree.unflatten(setting.structure.opt_state, parts.opt_state)
        # Unpadded once, not in each micro-batch.
        params = [
            x if x is None or leaf.place != DEVICE else plan.unpadded(x, leaf)
            for x, leaf in zip(parts.params, plan.compute, strict=True)
        ]
        entered = enter(setting.inserter, plan, plan.compute, params, self._reader)
        # The body has no memory kinds, only shapes.
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.compute]
        like_params, like_grads = (
            jax.tree.unflatten(setting.structure.params, x) for x in (shapes, update.gradients)
        )
        no_grads, no_updates = optax.tree.zeros_like((like_grads, like_params))
        view = View(opt, grads=no_grads, updates=no_updates)
        start = Parts(like_params, view, parts.step, rest)
        sender = GradientSender(setting, opt)
        # Under accumulation a gradient is complete only after the last micro-batch.
        send = sender if setting.layout.accumulation == 1 else None
        new_parts, out = evaluate_body(setting, self._tx, start, entered, batch, further, send)
        grads: list[Any] = jax.tree.leaves(new_parts.opt_state.grads)
        sums = sender.square_sums
        if send is None:
            grads = [
                setting.inserter.constrain(g, layout.full(leaf.spec, g.ndim))
                for g, leaf in zip(grads, plan.compute, strict=True)
            ]
            sums = [*map(sender.sums, grads)]
        scalars, shared = update.prelude(grads, parts.opt_state, sums)
        numbers = update.with_shared(parts.opt_state, shared)
        after: ZeroOptState = jax.tree.unflatten(setting.structure.opt_state, numbers)
        done = after.skipped == opt.skipped if setting.config.skips_overflow else None
        new_rest = unless_skipped(done, new_parts.rest, rest)
        stored: list[Any] = [g.stored if isinstance(g, Unpadded) else g for g in grads]
        return GradientResult(
            grads=[
                pad(x, leaf.padded) if used else None
                for x, leaf, used in zip(stored, plan.compute, update.uses, strict=True)
            ],
            scalars=scalars,
            shared=shared,
            rest=plan.each(lambda x, leaf: pad(x, leaf.padded), new_rest, plan.leaves["rest"]),
            step=new_parts.step,
            out=plan.results(out),
            done=done,
            signals=self._signals(after, beside(out)),
        )
