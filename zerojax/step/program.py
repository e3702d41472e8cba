"""The settings that a step is compiled from, and the protocol of a compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from zerojax.collectives import Inserter
from zerojax.collectives.gathering import Thresholds
from zerojax.config import ZeroConfig
from zerojax.devices.mesh import micro_batch_devices
from zerojax.monitor.after_step import Signals
from zerojax.offload.activations import smallest_away
from zerojax.optim.wrap import ZeroOptState
from zerojax.placement.states import States
from zerojax.plan.places import offloads
from zerojax.plan.quantized import FP8_BOUND, sent_formats
from zerojax.step.batch import BatchLayout
from zerojax.step.body import Body
from zerojax.step.call import Further, RearrangedFunction, Signature
from zerojax.step.further_arguments import spec_on, with_specs
from zerojax.trace.explicit import Explicit
from zerojax.train_state.state_parts import FlatParts, OpenedState, Parts, StateKind
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree


class StepSetting:
    """The settings of one step for one kind of state, before the step is compiled.

    Args:
      function: The user's step, in the order of :class:`zerojax.step.call.Call`.
      states: Turns a user's states into sharded states.
      opened: A state of that kind; its arrays are not kept.
      explicit: Axes and specs of the batch, for a step under explicit mesh axes; else None.

    Attributes:
      states, explicit: The arguments of these names.
      tx: The state's optimizer.
      structure: ``jax.tree.structure`` of each of a state's parts.
      plan: PartitionSpec and bytes of every leaf of the state.
      layout: The placement of the batch.
      body: The user's step on the parts of a state.
      inserter: Gathers parameters where the body uses them.
    """

    def __init__(
        self,
        function: RearrangedFunction,
        states: States,
        opened: OpenedState,
        explicit: Explicit | None,
    ) -> None:
        self.states, self.explicit, self.tx = states, explicit, opened.tx
        self.structure = Parts(*map(jax.tree.structure, opened.parts))
        opt_state: ZeroOptState = opened.parts.opt_state
        leaves, self._numbers = jax.tree.flatten(opt_state._replace(inner=None))
        inner: Any = jax.tree.structure(opt_state.inner)
        first = self.structure.params.num_leaves + inner.num_leaves
        self._slice_of_numbers = slice(first, first + len(leaves))
        self.plan = plan = states.plan(opened)
        self._spec_of = functools.cache(functools.partial(spec_on, plan))
        mesh, axis, config = plan.lowering_mesh, states.axis, states.config
        self.layout = BatchLayout(
            mesh, config.batch(micro_batch_devices(mesh)), function.signature.batch_axis
        )
        if self.layout.schedule is not None and offloads(config):
            raise ValueError(
                "zerojax does not support offload_optimizer and offload_param with pipeline "
                'stages. Remove them, or the mesh axis "stage" and the section pipeline.'
            )
        clips = bool(config.gradient_clipping)
        needs_tx = [*states.keys_of_parameters(), *["gradient_clipping"] * clips]
        if plan.fp8.leaves:
            states.warn_once(FP8_BOUND)
        # Why the step may update only once, with the remedy.
        once = "fp16 does not support. Update once, or use bf16" if config.fp16 else ""
        if (k := self.layout.accumulation) > 1:
            once = (
                f"accumulation over {k} micro-batches does not support. Update once, or set "
                "gradient_accumulation_steps to 1"
            )
        if offloads(config):
            once = "offload does not support. Update once, or train without offload"
        self.body = Body(function, opened.kind, once, needs_tx)
        self.inserter = Inserter(
            mesh,
            axis,
            # Below stage 3 a parameter is gathered once, and stays until the end of the step.
            keep=config.stage < 3,
            overlap=config.overlap_comm is not False,
            sent=sent_formats(config)._replace(multiplied=plan.fp8.multiplied),
            thresholds=Thresholds(small=config.small_array_size, away=smallest_away(config)),
        )

    @property
    def config(self) -> ZeroConfig:
        """The config."""
        return self.states.config

    @property
    def kind(self) -> StateKind:
        """The kind of state."""
        return self.body.kind

    def with_specs(self, further: Further) -> Further:
        """Returns a step's further arguments with the specs of frozen arrays."""
        return with_specs(further, self._spec_of)

    def numbers(self, flat: FlatParts) -> Sequence[Any]:
        """Returns the arrays of :meth:`zero_state`."""
        return flat.leaves[self._slice_of_numbers]

    def zero_state(self, numbers: Sequence[Any]) -> ZeroOptState:
        """Returns the optimizer's state without optax's state."""
        zero_state: ZeroOptState = jax.tree.unflatten(self._numbers, numbers)
        return zero_state

    def serves(self, signature: Signature, explicit: Explicit | None) -> bool:
        """Returns whether the program serves calls of this signature under these axes."""
        return (self.body.function.signature, self.explicit) == (signature, explicit)


MakeSignals = Callable[[ZeroOptState, PyTree], Signals]
"""Function from the optimizer state and the results to the values that the host reads after a
step."""


class StepResult(NamedTuple):
    """The results of a step: the arrays of the state after the step, the other results of the
    user's step, and the signals."""

    flat: FlatParts
    out: PyTree
    signals: Signals


class StepProgram(Protocol):
    """A compiled step: resident, in one program, or offloaded, in several. Its class takes the
    setting; whether to reuse the memory of the state that is passed to the step; and
    :data:`MakeSignals`.

    Attributes:
      setting: The settings that the step was compiled from.
      fits: Whether the step is known to fit the devices' memory.
    """

    setting: StepSetting
    fits: bool

    def __call__(self, flat: FlatParts, batch: PyTree, further: Further) -> StepResult:
        """Runs the step on a state and a batch that are placed as planned."""

    def traced(self, parts: Parts, batch: PyTree, further: Further) -> jax.stages.Traced:
        """Traces the program that runs the user's step, for abstract or concrete arguments."""

    def lowered(self, parts: Parts, batch: PyTree, further: Further) -> Iterator[LoweredProgram]:
        """Lowers all programs of the step, each once, for abstract or concrete arguments."""

    def save_memory(self) -> None:
        """Lets XLA save memory from now on, because the step does not fit otherwise."""
