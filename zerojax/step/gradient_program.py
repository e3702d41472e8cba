"""The program that computes the gradients of a step, and all other results but the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.collectives.gathering import plain
from zerojax.collectives.host import (
    Host,
    Unpadded,
    fetch_to_device,
    on_host,
    send_to_host,
    unpadded,
)
from zerojax.collectives.shard import Gathering, HostGradient
from zerojax.monitor.after_step import Signals
from zerojax.offload.disk_params import ParamReader, beside_disk
from zerojax.optim.norm import square_sums
from zerojax.optim.wrap import ZeroOptState, unscaled
from zerojax.plan.places import DEVICE
from zerojax.plan.state_sharding import layout
from zerojax.plan.stored import pad
from zerojax.step.call import Further
from zerojax.step.entering import enter
from zerojax.step.evaluate_body import evaluate_body, unless_skipped, was_done
from zerojax.step.optimizer_update import OptimizerUpdate
from zerojax.step.program import MakeSignals, StepSetting
from zerojax.step.view import View, collecting, constrainer
from zerojax.train_state.results import beside
from zerojax.train_state.state_parts import Parts
from zerojax.xla import compat
from zerojax.xla.compiler import streaming
from zerojax.xla.garbage import seldom_collected
from zerojax.xla.lowered import BATCH, GRADIENTS, STATE, LoweredProgram, with_argument_names
from zerojax.xla.types import PyTree


class GradientResult(NamedTuple):
    """The results of the program.

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


class GradientProgram:
    """The user's step, compiled with an optimizer that only collects the gradients.

    The program takes :class:`Parts` whose parameters are the compute parameters, a list with None
    for those on disk, which the program reads itself; and whose optimizer state is a list of its
    leaves, with None for the streamed arrays.

    Args:
      setting: The step.
      update: The update that follows.
      signals: See :data:`zerojax.step.program.MakeSignals`.
    """

    def __init__(self, setting: StepSetting, update: OptimizerUpdate, signals: MakeSignals) -> None:
        self._setting, self._update, self._signals = setting, update, signals
        plan = setting.plan
        grads = plan.grads if setting.layout.accumulation > 1 else plan.params
        self._tx = collecting(constrainer(plan.on_device(grads)), update.uses)
        self._reader = ParamReader.of(setting.config)
        shardings = plan.shardings()
        # For None, jit leaves a result's sharding to XLA.
        unset: Any = GradientResult._make([None] * len(GradientResult._fields))
        gradients = [plan.sharding(leaf) for leaf in plan.gradients()]
        self._jitted = jax.jit(
            with_argument_names(self._run, STATE, BATCH, "further"),
            out_shardings=unset._replace(grads=gradients, rest=shardings.rest, step=shardings.step),
            compiler_options=streaming(plan.mesh, dict(plan.config.xla)),
        )

    def __call__(self, parts: Parts, batch: PyTree, further: Further) -> GradientResult:
        """Runs the program.

        Args:
          parts: The state, with the compute parameters as its parameters.

        Raises:
          DiskStateError: A parameter on the disk differs from the data that was written.
        """
        if self._reader is not None:
            self._reader.use(parts.params)
        result: GradientResult = self._jitted(self._taken(parts), batch, further)
        if self._reader is not None:
            # Reads and the update's writes share a queue; finish the reads first.
            self._reader.check((result.grads, result.out))
        return result

    def traced(self, parts: Parts, batch: PyTree, further: Further) -> jax.stages.Traced:
        """Traces the program for abstract or concrete arguments."""
        batch = self._setting.layout.abstract(batch)
        return self._jitted.trace(self._taken(parts), batch, further)

    @seldom_collected()
    def lowered(self, parts: Parts, batch: PyTree, further: Further) -> LoweredProgram:
        """Lowers the program for abstract or concrete arguments."""
        traced = self.traced(parts, batch, further)
        return LoweredProgram(GRADIENTS, compat.lower_for(traced, self._setting.plan.mesh))

    def _taken(self, parts: Parts) -> Parts:
        """Returns the part of a state that the program takes."""
        return parts._replace(
            params=beside_disk(parts.params, self._setting.plan.compute),
            opt_state=self._update.numbers(parts.opt_state),
        )

    @compat.with_large_stack
    @seldom_collected()
    def _run(self, parts: Parts, batch: PyTree, further: Further) -> GradientResult:
        """Computes the gradients in the compiled program: the compute parameters enter as shards,
        the body runs with an optimizer that collects gradients, and the prelude of the update
        follows."""
        setting, plan = self._setting, self._setting.plan
        rest = plan.each(plan.unpadded, parts.rest, plan.leaves["rest"])
        opt: ZeroOptState = jax.tree.unflatten(setting.structure.opt_state, parts.opt_state)
        # Unpadded once, not in each micro-batch.
        params = [
            x if x is None or leaf.place != DEVICE else plan.unpadded(x, leaf)
            for x, leaf in zip(parts.params, plan.compute, strict=True)
        ]
        entered = enter(setting.inserter, plan, plan.compute, params, self._reader)
        start = Parts(
            # The body has no memory kinds, only shapes.
            params=self._params(jax.ShapeDtypeStruct, [leaf.dtype for leaf in plan.compute]),
            opt_state=View(
                opt=opt,
                grads=self._params(jnp.zeros, self._update.grad_dtypes),
                updates=self._params(jnp.zeros, [leaf.dtype for leaf in plan.compute]),
            ),
            step=parts.step,
            rest=rest,
        )
        sender = _GradientSender(setting, opt)
        # Under accumulation a gradient is complete only after the last micro-batch.
        is_one_batch = setting.layout.accumulation == 1
        new_parts, out = evaluate_body(
            setting,
            self._tx,
            start,
            entered,
            batch,
            further,
            sender if is_one_batch else None,
        )
        grads: list[Any] = jax.tree.leaves(new_parts.opt_state.grads)
        sums = sender.square_sums
        if not is_one_batch:
            grads = [
                setting.inserter.constrain(g, layout.full(leaf.spec, g.ndim))
                for g, leaf in zip(grads, plan.compute, strict=True)
            ]
            sums = [square_sums(unscaled(g, opt.loss_scale)) for g in grads]
        scalars, shared = self._update.prelude(grads, parts.opt_state, sums)
        numbers = self._update.with_shared(parts.opt_state, shared)
        after: ZeroOptState = jax.tree.unflatten(setting.structure.opt_state, numbers)
        done = was_done(setting, opt, after)
        stored: list[Any] = [g.stored if isinstance(g, Unpadded) else g for g in grads]
        return GradientResult(
            grads=[
                pad(x, leaf.padded) if used else None
                for x, leaf, used in zip(stored, plan.compute, self._update.uses, strict=True)
            ],
            scalars=scalars,
            shared=shared,
            rest=plan.each(
                lambda x, leaf: pad(x, leaf.padded),
                unless_skipped(done, new_parts.rest, rest),
                plan.leaves["rest"],
            ),
            step=new_parts.step,
            out=plan.results(out),
            done=done,
            signals=self._signals(after, beside(out)),
        )

    def _params(
        self, make: Callable[[tuple[int, ...], DTypeLike], object], dtypes: Sequence[DTypeLike]
    ) -> PyTree:
        """Returns a tree like the parameters, of ``make(shape, dtype)``."""
        leaves = zip(self._setting.plan.compute, dtypes, strict=True)
        arrays = [make(leaf.shape, dtype) for leaf, dtype in leaves]
        return jax.tree.unflatten(self._setting.structure.params, arrays)


class _GradientSender:
    """Sends each gradient to its place as soon as the body has computed it.

    Args:
      setting: The step.
      opt: The optimizer state, for its loss scale.

    Attributes:
      square_sums: Square sums of the gradients sent so far, in the order of the parameters.
    """

    def __init__(self, setting: StepSetting, opt: ZeroOptState) -> None:
        self._setting, self._opt = setting, opt
        self.square_sums: list[jax.Array] = []

    def _sums(self, gradient: jax.Array) -> jax.Array:
        return square_sums(unscaled(gradient, self._opt.loss_scale))

    def host(self) -> Host | None:
        """Returns how loops send gradients to the host; None if no parameter is offloaded."""
        config = self._setting.config
        if config.offload_param is None:
            return None
        return Host(config.stage3_param_persistence_threshold, self._sums)

    def __call__(self, gradient: Any) -> jax.Array | HostGradient:
        """Replaces the mark of the next gradient, in the order of the parameters: constrains the
        gradient to its shard, and sends it to host memory if its parameter is offloaded."""
        leaf = self._setting.plan.compute[len(self.square_sums)]
        if on_host(gradient) and leaf.place == DEVICE:
            gradient = fetch_to_device(gradient.value)
        if on_host(gradient):
            self.square_sums.append(gradient.sums)
            return gradient
        gradient = plain(gradient)  # it may be computed elementwise from its parameter
        spec = layout.full(leaf.spec, gradient.ndim)
        gradient = self._setting.inserter.constrain(gradient, spec)
        self.square_sums.append(self._sums(gradient))
        if leaf.place == DEVICE:
            return gradient
        at_rest = send_to_host(pad(gradient, leaf.padded))
        value = unpadded(at_rest, leaf.shape)
        gathering = Gathering(host=True)
        return HostGradient(value, spec, gathering=gathering, sums=self.square_sums[-1])
