"""Functions of `plan` and `fit`, which compile for devices that need not exist."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from zerojax.foresight.devices import HERE
from zerojax.models.attention import ASKED
from zerojax.models.registry import takes


def compile_only(devices: str) -> None:
    """Configures JAX, before its first use, for absent devices: no search for GPUs, no cache of
    compiled programs. Does nothing if the devices exist."""
    if devices == HERE:
        return
    jax.config.update("jax_platforms", "cpu")  # the compiler's plugin would search for GPUs
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back such programs


def with_attention(function: Callable[..., Any], model: str, asked: str | None) -> Any:
    """Returns a model's function with the attention that ``--attention`` asks for.

    Raises:
      ValueError: The model takes no ``attention``, or no attention has that name.
    """
    if asked is None:
        return function
    if not takes(function, "attention"):
        raise ValueError(f"--attention: model {model!r} takes no `attention`")
    if asked not in ASKED:
        raise ValueError(f"--attention: {asked!r} is unknown; there are {', '.join(ASKED)}")
    return functools.partial(function, attention=asked)
