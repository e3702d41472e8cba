"""``zero.evaluate``: a function of a state that updates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import jax
from jax.sharding import Mesh

from zerojax.devices.mesh import automatic_context, relabel_arrays
from zerojax.evaluation.objects import update
from zerojax.evaluation.program import EvaluationProgram
from zerojax.step.arguments import Arguments
from zerojax.step.call import Call, Signature
from zerojax.step.decorated import Decorated, P, R, check_concrete, check_not_deleted
from zerojax.trace.explicit import Explicit
from zerojax.train_state.results import put_back
from zerojax.train_state.state_parts import OpenedState
from zerojax.xla import compat
from zerojax.xla.lowered import LoweredProgram
from zerojax.xla.types import PyTree


class Evaluation(Decorated[P, R]):
    """An evaluated function, the result of ``zero.evaluate``; called like the function itself.

    Args:
      arguments: The arguments of the function ``(state, batch, ...) -> anything`` with a flax
        ``TrainState``, or ``(model, batch, ...) -> anything`` with NNX objects, of which all but
        the parameters may change in place.
      states: Shards and places states as the config asks.
    """

    @compat.with_short_traceback
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        mesh, watchdog = self._states.mesh, self._watchdog
        types = jax.sharding.get_abstract_mesh().axis_types
        with automatic_context(mesh) as names:
            opened, call = self._opened(args, kwargs)
            parts = opened.parts
            check_concrete(self._arguments.name, (parts, call.batch, call.further))
            check_not_deleted(jax.tree.leaves((parts.params, parts.rest)))
            self._agree(call)
            explicit = Explicit.of(names, call.batch)
            if explicit:
                call = self._relabelled(call)
            program = self._program(opened, call.signature, explicit)
            given = opened, call.batch, call.further
            self._compare(program, call, lambda: program.lowered(*given))
            out, changed = program(*given)
            update(call.objects, opened, changed)
            program.function.bring_up_to_date(call)
            out = put_back(out, call.objects)
        if watchdog:
            watchdog.ran(out)
        self._limit_in_flight(out)
        if names:
            out = relabel_arrays(out, Mesh(mesh.devices, mesh.axis_names, axis_types=types))
        return out  # type: ignore[no-any-return]

    def _with(self, arguments: Arguments) -> Self:
        return type(self)(arguments, self._states)

    def programs(self, *args: PyTree, **kwargs: PyTree) -> Iterator[LoweredProgram]:
        """Yields the single program, called "evaluation", lowered; like ``programs`` of a step."""
        with automatic_context(self._states.mesh) as names:
            opened, call = self._opened(args, kwargs)
            program = self._program(opened, call.signature, Explicit.of(names, call.batch))
            yield from program.lowered(opened, call.batch, call.further)

    def _opened(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[OpenedState, Call]:
        call = self._arguments.sort(self._arguments.by_slot(args, kwargs))
        opened = self._states.split_with_parameters(call.objects, read_only=True)
        return self._states.observed(opened), call

    def _program(
        self, opened: OpenedState, signature: Signature, explicit: Explicit | None
    ) -> EvaluationProgram:
        def make() -> EvaluationProgram:
            function = self._arguments.rearranged(signature)
            return EvaluationProgram(function, self._states, opened, explicit)

        return self._compiled(opened, signature, explicit, make)
