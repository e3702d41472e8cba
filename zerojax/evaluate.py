"""``zero.evaluate``: a function of a state that updates nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from zerojax.evaluate_objects import Given, Subject, given, subject
from zerojax.evaluate_program import EvaluationProgram
from zerojax.lowered import LoweredProgram
from zerojax.offload.places import check_memories
from zerojax.state import States


class Evaluation:
    """An evaluated function, made by ``zero.evaluate``; call it as the function itself.

    Args:
      function: ``(state, batch, ...) -> anything`` with a flax ``TrainState``, or ``(model, batch,
        ...) -> anything`` with NNX objects, of which all but the parameters may change in place.
      states: what the config makes of a state.
    """

    def __init__(self, function: Callable[..., Any], states: States) -> None:
        functools.update_wrapper(self, function)
        self._name = getattr(function, "__name__", "the function")
        self._function, self._states = function, states
        self._programs: dict[Any, EvaluationProgram] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found, call = self._opened(args, kwargs)
        self._check(found, call)
        out, changed = self._program(found)(found.opened, call.batch, call.args, call.kwargs)
        if any(x is not None for x in changed):
            found.update(changed)
        return out

    def _check(self, found: Subject, call: Given) -> None:
        parts = found.opened.parts
        for x in jax.tree.leaves((parts, call.batch, call.args, call.kwargs)):
            if isinstance(x, jax.core.Tracer):
                raise TypeError(
                    f"{self._name} is a function of zero.evaluate, which compiles it itself: call "
                    "it outside jax.jit, scan, vmap and grad."
                )
        if any(x.is_deleted() for x in jax.tree.leaves(parts.params) if hasattr(x, "is_deleted")):
            raise ValueError(
                "this state was passed to an earlier step, which took over its memory: evaluate "
                "the state that the step returned."
            )

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for abstract (or concrete) arguments, as ``jax.jit(f).lower`` does.

        Works for a mesh of devices that are not there (:func:`zerojax.topology`).
        """
        return next(self.programs(*args, **kwargs)).lowered

    def programs(self, *args: Any, **kwargs: Any) -> Iterator[LoweredProgram]:
        """The one program, called "evaluation", lowered; as ``programs`` of a step."""
        found, call = self._opened(args, kwargs)
        program = self._program(found)
        yield from program.lowered(found.opened, call.batch, call.args, call.kwargs)

    def _opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Subject, Given]:
        call = given(self._function, args, kwargs)
        found = subject(call)
        opened = self._states.observed(found.opened)
        return dataclasses.replace(found, opened=opened), call

    def _program(self, found: Subject) -> EvaluationProgram:
        opened = found.opened
        leaves, tree = jax.tree.flatten(opened.parts)
        shapes = tuple((np.shape(x), x.dtype) for x in leaves)
        key = found.key, opened.tx, tree, shapes, opened.specs
        if key not in self._programs:
            check_memories(self._states.config, self._states.mesh)
            self._programs[key] = EvaluationProgram(self._function, self._states, found)
        return self._programs[key]
