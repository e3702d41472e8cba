"""A function under ``jax.jit`` or ``nnx.jit``: the function without its jit, and the jit's options.

Any other wrapper is part of the author's function, and is kept.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable

import jax
from flax import nnx

from zerojax.xla import compat
from zerojax.xla.types import PyTree

Slot = int | str  # an argument: its position, or its name if it may be passed only by name


def open_jit(
    function: Callable[..., PyTree],
) -> tuple[Callable[..., PyTree], tuple[Slot, ...], tuple[Slot, ...]]:
    """Removes ``jax.jit`` and ``nnx.jit`` from a function and keeps its other wrappers.

    Returns:
      The function as its author wrote it, and the static and the donated arguments of the ``jit``;
      none without a ``jit``.

    Raises:
      ValueError: The jit has an option that a decorated step cannot have.
    """
    if isinstance(function, types.MethodType):
        opened, static, donated = open_jit(function.__func__)
        if opened is function.__func__:
            return function, (), ()
        bound = types.MethodType(opened, function.__self__)
        return bound, without_self(static), without_self(donated)
    if type(function) is type(jax.jit(_nothing)):
        jit = function
    # With graph=False, nnx.jit returns another class than in graph mode.
    elif type(function) in (type(nnx.jit(_nothing)), type(nnx.jit(_nothing, graph=False))):
        jit = function.jitted_fn  # type: ignore[attr-defined]
    else:
        _check_no_pmap(function)
        return function, (), ()
    opened, static, donated = open_jit(function.__wrapped__)  # type: ignore[attr-defined]
    options = compat.jit_options(jit)
    if options.given:
        raise ValueError(
            f"{name_of(function)} is jitted with {options.given[0]}=, which zerojax ignores. "
            "Remove it: zerojax.zero(mesh=..., specs=...) says where a step runs and its layout."
        )
    return opened, (*static, *options.static), (*donated, *options.donated)


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
