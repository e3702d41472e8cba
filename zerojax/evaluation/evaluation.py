"""``zero.evaluate``: a function of a state that updates nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.devices.mesh import automatic_context, relabelled
from zerojax.evaluation.objects import Subject, subject
from zerojax.evaluation.program import EvaluationProgram
from zerojax.placement.states import States
from zerojax.plan.places import check_memories
from zerojax.step.arguments import Arguments, is_train_state
from zerojax.step.call import Call, Form, divide, returned
from zerojax.trace.explicit import Explicit
from zerojax.train_state.nnx import apply_settings, is_nnx
from zerojax.xla.lowered import LoweredProgram

P = ParamSpec("P")
R = TypeVar("R")


class Evaluation(Generic[P, R]):
    """An evaluated function, made by ``zero.evaluate``; call it as the function itself.

    Args:
      arguments: of the function ``(state, batch, ...) -> anything`` with a flax ``TrainState``, or
        ``(model, batch, ...) -> anything`` with NNX objects, of which all but the parameters may
        change in place.
      states: what the config makes of a state.
    """

    def __init__(self, arguments: Arguments, states: States) -> None:
        functools.update_wrapper(self, arguments.function)
        self._arguments, self._states = arguments, states
        self._programs: dict[Any, EvaluationProgram] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        mesh = self._states.mesh
        types = jax.sharding.get_abstract_mesh().axis_types
        with automatic_context(mesh) as names:
            out: Any = self._run(args, kwargs, names)
        if names:
            out = relabelled(out, Mesh(mesh.devices, mesh.axis_names, axis_types=types))
        return out  # type: ignore[no-any-return]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> Any:
        found, call = self._opened(args, kwargs)
        self._check(found, call)
        explicit = Explicit.of(names, call.batch)
        if explicit:
            given = {"batch": call.batch, "args": call.args, "kwargs": call.kwargs}
            call = call._replace(**relabelled(given, self._states.mesh))
        program = self._program(found, call.form, explicit)
        out, changed = program(found.opened, call.batch, call.args, call.kwargs)
        if any(x is not None for x in changed):
            found.update(changed)
        settings = program.function.changed
        if any(settings.values()):
            apply_settings(call.objects, settings[divide(call.args, call.kwargs)[1]])
        return returned(out, call.objects)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The function of an instance, where it is defined in a class. What it reads of ``self``
        is part of the program, unless ``self`` is the state."""
        if instance is None:
            return self
        if is_nnx(instance) or is_train_state(instance):
            return functools.partial(self, instance)
        kept = vars(instance).get(self._arguments.name)
        if not isinstance(kept, Evaluation):
            kept = Evaluation(self._arguments.bound(instance), self._states)
            vars(instance)[self._arguments.name] = kept
        return kept

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for abstract (or concrete) arguments, as ``jax.jit(f).lower`` does.

        Works for a mesh of devices that are not there (:func:`zerojax.topology`).
        """
        return next(self.programs(*args, **kwargs)).lowered

    def programs(self, *args: Any, **kwargs: Any) -> Iterator[LoweredProgram]:
        """The one program, called "evaluation", lowered; as ``programs`` of a step."""
        with automatic_context(self._states.mesh) as names:
            found, call = self._opened(args, kwargs)
            program = self._program(found, call.form, Explicit.of(names, call.batch))
            yield from program.lowered(found.opened, call.batch, call.args, call.kwargs)

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Subject, Call]:
        call = self._arguments.sort(args, kwargs)
        found = subject(call.objects)
        opened = self._states.observed(found.opened)
        return dataclasses.replace(found, opened=opened), call

    def _check(self, found: Subject, call: Call) -> None:
        parts = found.opened.parts
        given = (parts, call.batch, call.args, call.kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
            raise TypeError(
                f"{self._arguments.name} is a function of zero.evaluate, which compiles it itself: "
                "call it outside jax.jit, scan, vmap and grad."
            )
        if any(x.is_deleted() for x in jax.tree.leaves(parts.params) if hasattr(x, "is_deleted")):
            raise ValueError(
                "this state was passed to an earlier step, which took over its memory: evaluate "
                "the state that the step returned."
            )

    def _program(self, found: Subject, form: Form, explicit: Explicit | None) -> EvaluationProgram:
        opened = found.opened
        leaves, tree = jax.tree.flatten(opened.parts)
        shapes = tuple((np.shape(x), x.dtype) for x in leaves)
        key = opened.key, opened.tx, tree, shapes, opened.specs, form, explicit
        if key not in self._programs:
            check_memories(self._states.config, self._states.mesh)
            function = self._arguments.rearranged(form)
            self._programs[key] = EvaluationProgram(function, self._states, found, explicit)
        return self._programs[key]
