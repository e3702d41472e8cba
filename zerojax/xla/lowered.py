"""The lowered programs of a step, and the names by which other packages know their contents.

XLA keeps the names of a program's arguments, so that a forecast can distinguish the parameters from
the batch. Only this module defines these names: :func:`with_argument_names` gives them to a
program's arguments, whatever the parameters of its Python function are called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

R = TypeVar("R")

STEP, GRADIENTS, EVALUATION = "step", "gradients", "evaluation"
"""Names of programs: a step's only program, the first of several, and ``zero.evaluate``'s."""

STATE, BATCH = "parts", "batch"
"""Arguments of a program that runs the user's function: the state, a
:class:`zerojax.train_state.state_parts.Parts`, and the batch."""

WRITTEN, READ, LOADED = "written", "read", "loaded"
"""Arguments of a program that updates sub-groups: arrays that the update replaces, arrays that the
update reads, and rows of the state that were loaded onto the device before."""


class LoweredProgram(NamedTuple):
    """One compiled unit of a step.

    Attributes:
      name: :data:`STEP` if a step is one program; under offload :data:`GRADIENTS`, then
        "update 1", "update 2", ...; :data:`EVALUATION` for an evaluated function.
      lowered: lowered program, to be compiled for the devices of the step.
      times: number of runs in one step.
    """

    name: str
    lowered: jax.stages.Lowered
    times: int = 1


def with_argument_names(function: Callable[..., R], *names: str) -> Callable[..., R]:
    """Returns a function whose positional arguments have these names in the compiled program.

    Args:
      function: The function for ``jax.jit``, which takes as many arguments as there are names.

    Example:
      >>> jitted = jax.jit(with_argument_names(lambda x: x + 1, "written"))
      >>> "written" in jitted.lower(1.0).as_text(debug_info=True)
      True
    """

    # A method has no attributes of its own; a partial has, and no frame in a trace.
    renamed: Any = functools.wraps(function)(functools.partial(function))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # jax.jit names the arguments of a compiled program by the signature of the function.
    renamed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return renamed  # type: ignore[no-any-return]
