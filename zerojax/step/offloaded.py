"""A step whose state is stored partly in host memory or on disk: several programs in turn.

1. The gradients (:mod:`zerojax.step.gradient_program`): the user's step with an optimizer that
   only collects them.
2. The update, sub-group by sub-group (:mod:`zerojax.step.optimizer_update`), unless the gradients
   overflowed.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from zerojax.placement.states import abstract
from zerojax.plan.places import DISK
from zerojax.step.call import Further
from zerojax.step.gradient_program import GradientProgram
from zerojax.step.optimizer_update import OptimizerUpdate
from zerojax.step.program import MakeSignals, StepResult, StepSetting
from zerojax.train_state.state_parts import FlatParts, Parts
from zerojax.xla import compat
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree


class OffloadedStep:
    """The compiled step, see :class:`zerojax.step.program.StepProgram`.

    Raises:
      ValueError: ``donate=False`` for a state on disk.
    """

    fits = False

    setting: StepSetting
    update: OptimizerUpdate

    def __init__(self, setting: StepSetting, donate: bool, signals: MakeSignals) -> None:
        self.setting, self._donate, plan = setting, donate, setting.plan
        if not donate and plan.bytes_in(DISK):
            raise ValueError(
                "donate=False cannot keep a state on disk, which a step overwrites. Remove it, or "
                'offload to device "cpu".'
            )
        self._copies = setting.states.placer.copies(plan)
        self.update = OptimizerUpdate(setting, self._copies)
        self._gradients = GradientProgram(setting, self.update, signals)

    def __call__(self, flat: FlatParts, batch: PyTree, further: Further) -> StepResult:
        setting = self.setting
        parts = setting.plan.stored(flat).parts()
        params, opt_state = jax.tree.leaves(parts.params), jax.tree.leaves(parts.opt_state)
        inputs = parts._replace(params=self._copies.of(params), opt_state=opt_state)
        result = self._gradients(inputs, batch, further)
        del inputs
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

    def recompute(self) -> None:
        """See :meth:`StepProgram.recompute`. These programs leave out no pass of XLA."""

    def traced(self, parts: Parts, batch: PyTree, further: Further) -> jax.stages.Traced:
        """Traces the program of the gradients."""
        return self._gradients.traced(self._given(parts), batch, further)

    def _given(self, parts: Parts) -> Parts:
        """Returns the abstract input of the program of the gradients."""
        parts = abstract(parts, self.setting.plan, at_rest=True)
        opt_state = jax.tree.leaves(parts.opt_state)
        return parts._replace(params=self._copies.abstract(), opt_state=opt_state)

    def lowered(self, parts: Parts, batch: PyTree, further: Further) -> Iterator[LoweredProgram]:
        """Lowers first the program of the gradients, then the programs of the update."""
        plan = self.setting.plan
        yield self._gradients.lowered(self._given(parts), batch, further)
        for name, traced, times in self.update.by_groups.traced():
            yield LoweredProgram(name, compat.lower_for(traced, plan.mesh), times)
