"""A step whose state is stored on the devices: one program."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from zerojax.collectives.matrices import MatrixUpdate
from zerojax.devices.mesh import axis_size
from zerojax.devices.rates import memory_options
from zerojax.placement.states import abstract
from zerojax.plan.places import reaches_host
from zerojax.plan.state_sharding import DTYPES
from zerojax.step.call import Further
from zerojax.step.entering import enter, with_masters
from zerojax.step.evaluate_body import evaluate_body
from zerojax.step.program import MakeSignals, StepResult, StepSetting
from zerojax.step.view import (
    View,
    cast,
    constrainer,
    params_after,
    to_shards,
    unless_skipped,
    updating,
)
from zerojax.train_state.results import beside
from zerojax.train_state.state_parts import FlatParts, Parts
from zerojax.xla import compat
from zerojax.xla.compiler import JitOnceDecided, Options, options
from zerojax.xla.garbage import seldom_collected
from zerojax.xla.lowered import BATCH, STATE, STEP, LoweredProgram, with_argument_names
from zerojax.xla.types import PyTree


class ResidentStep:
    """The compiled step, see :class:`zerojax.step.program.StepProgram`. Its program takes and
    returns the state at rest, and runs :func:`zerojax.step.evaluate_body.evaluate_body` between."""

    fits = False

    def __init__(self, setting: StepSetting, donate: bool, signals: MakeSignals) -> None:
        self.setting, self._signals, plan = setting, signals, setting.plan
        shardings = plan.shardings()
        self._to_shards = constrainer(shardings.params)
        inner = jax.tree.unflatten(setting.structure.opt_state, plan.leaves["opt_state"]).inner
        matrices = MatrixUpdate.of(setting.inserter, plan, jax.tree.leaves(inner))
        self._tx = updating(setting.tx, to_shards(plan), matrices)
        self._jitted = JitOnceDecided(
            with_argument_names(self._step, STATE, BATCH, "further"),
            self._options,
            donate_argnums=(0,) if donate else (),
            out_shardings=StepResult(FlatParts.of(shardings), None, None),  # type: ignore[arg-type]
        )

    def _options(self) -> Options | None:
        """Returns XLA's options for the traced program."""
        plan = self.setting.plan
        device = plan.mesh.devices.flat[0]
        return options(
            plan.mesh,
            {**memory_options(device, plan.bytes_per_device), **plan.config.xla},
            shards=axis_size(plan.mesh, plan.axis),
            layer=max(self.setting.inserter.layers, default=0),
            overlap=plan.config.overlap_comm is not False,
            fp8=bool(plan.fp8.leaves),
        )

    def save_memory(self) -> None:
        """See :meth:`StepProgram.save_memory`."""
        self._jitted.save_memory()

    @compat.with_large_stack
    @seldom_collected()
    def _step(self, flat: FlatParts, batch: PyTree, further: Further) -> StepResult:
        """Runs the step in the compiled program. The body computes with a copy of the parameters if
        the config has a compute dtype, or secondary shards; masters are updated beside the copy."""
        setting, dtype = self.setting, DTYPES[self.setting.config.compute_dtype]
        parts = setting.plan.without_padding(flat.parts())
        compute, view = parts.params, View(opt=parts.opt_state)
        if dtype is not None:
            # Constrained behind the cast, else XLA may gather the masters: twice the bytes.
            compute = self._to_shards(cast(parts.params, dtype))
        if dtype is not None or setting.plan.secondary():  # the body has a copy of the parameters
            view = View(opt=parts.opt_state, masters=parts.params, compute=compute)
        start = parts._replace(params=compute, opt_state=view)
        plan = setting.plan
        entered = enter(setting.inserter, plan, plan.compute, jax.tree.leaves(compute))
        if dtype is not None and not plan.secondary():
            entered = with_masters(entered, jax.tree.leaves(parts.params))
        new_parts, out = evaluate_body(setting, self._tx, start, entered, batch, further)
        after: View = new_parts.opt_state
        skips = setting.config.skips_overflow
        done = after.opt.skipped == parts.opt_state.skipped if skips else None
        new_parts = new_parts._replace(
            params=params_after(after, new_parts.params, compute, parts.params, done),
            opt_state=after.opt,
            rest=unless_skipped(done, new_parts.rest, parts.rest),
        )
        return StepResult(
            FlatParts.of(plan.at_rest(new_parts)).like(flat),
            plan.results(out),
            self._signals(new_parts.opt_state, beside(out)),
        )

    def __call__(self, flat: FlatParts, batch: PyTree, further: Further) -> StepResult:
        plan = self.setting.plan
        result: StepResult = self._jitted(plan.stored(flat), batch, further)
        return result if plan.plain else result._replace(flat=plan.shown(result.flat))

    def traced(self, parts: Parts, batch: PyTree, further: Further) -> jax.stages.Traced:
        """Traces the one program."""
        setting = self.setting
        flat = FlatParts.of(abstract(parts, setting.plan, at_rest=True))
        batch = setting.layout.abstract(batch)
        return self._jitted.trace(flat, batch, further)

    def lowered(self, parts: Parts, batch: PyTree, further: Further) -> Iterator[LoweredProgram]:
        """Lowers the one program."""
        setting = self.setting
        reaches = reaches_host(setting.config)
        with seldom_collected():
            traced = self.traced(parts, batch, further)
            program = compat.lower_for(traced, setting.plan.mesh) if reaches else traced.lower()
        yield LoweredProgram(STEP, program)
