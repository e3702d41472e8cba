"""A function under ``jax.jit`` or ``nnx.jit``: the function without its jit, and the jit's options.

Any other wrapper is part of the author's function, and is kept.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
from flax import nnx

from zerojax.xla import compat
from zerojax.xla.types import PyTree

Slot = int | str  # an argument of a call: its position, or the name that it was passed by

_REMEDIES = {
    "in_shardings": "zerojax lays out the state and the batch; a model's own PartitionSpecs go "
    "into its metadata or zerojax.zero(specs=...)",
    "out_shardings": "zerojax lays out the state that the step returns",
    "device": "zerojax.zero(mesh=...) says where a step runs",
    "backend": "zerojax.zero(mesh=...) says where a step runs",
    "compiler_options": "zerojax compiles the step with options of its own",
}


class Jitted(NamedTuple):
    """A function without its ``jit``.

    Attributes:
      function: The function as its author wrote it.
      static, donated: The static and the donated arguments of the ``jit``; none without a ``jit``.
    """

    function: Callable[..., PyTree]
    static: tuple[Slot, ...] = ()
    donated: tuple[Slot, ...] = ()


def open_jit(function: Callable[..., PyTree]) -> Jitted:
    """Removes ``jax.jit`` and ``nnx.jit`` from a function and keeps its other wrappers.

    Raises:
      ValueError: The jit has an option that a decorated step cannot have.
    """
    if isinstance(function, types.MethodType):
        opened = open_jit(function.__func__)
        if opened.function is function.__func__:
            return Jitted(function)
        bound = types.MethodType(opened.function, function.__self__)
        return Jitted(bound, without_self(opened.static), without_self(opened.donated))
    if type(function) is type(jax.jit(_nothing)):
        jit = function
    # With graph=False, nnx.jit returns another class than in graph mode.
    elif type(function) in (type(nnx.jit(_nothing)), type(nnx.jit(_nothing, graph=False))):
        jit = function.jitted_fn  # type: ignore[attr-defined]
    else:
        _check_no_pmap(function)
        return Jitted(function)
    opened = open_jit(function.__wrapped__)  # type: ignore[attr-defined]
    options = compat.jit_options(jit)
    for name in options.given:
        raise ValueError(
            f"{name_of(function)} is jitted with {name}=, which zerojax ignores. Remove it: "
            f"{_REMEDIES[name]}."
        )
    return Jitted(
        opened.function, (*opened.static, *options.static), (*opened.donated, *options.donated)
    )


def _check_no_pmap(function: Callable[..., object]) -> None:
    code = getattr(function, "__code__", None)
    # pmap returns a plain function, told by the code that all of its results share.
    if hasattr(function, "lower") and code is getattr(jax.pmap(_nothing), "__code__", None):
        raise ValueError(
            f"{name_of(function)} is under jax.pmap. Remove it, and pmean and psum in the body: a "
            "decorated step sees the global batch and one state."
        )


def without_self(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Returns the slots for a bound method, whose positions count from the one after ``self``."""
    return tuple(s - 1 if isinstance(s, int) and s > 0 else s for s in slots if s != 0)


def name_of(function: Callable[..., object]) -> str:
    """Returns a function's name for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", "the step")


def _nothing() -> None:
    """Does nothing; the class of its jit is the class of every function under that jit."""
