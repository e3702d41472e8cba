"""The message of a command for an error in its input, or in the user's code."""

from __future__ import annotations

import contextlib
import importlib.util
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax
import typer

from zerojax.cli.options import wrong_input
from zerojax.config import ConfigError
from zerojax.models.registry import ModelError

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "zerojax")
_TOO_LARGE = "overflow in static extent product: "
_TRITON = "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"


@contextlib.contextmanager
def wrong_inputs(doing: str = "") -> Iterator[None]:
    """Exits with 2, after one message, for errors of the input or of the user's code.

    Args:
      doing: The action, for errors that do not state it.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        message = explain_error(error, doing)
        if message is None:
            raise
        wrong_input(message)


def explain_error(error: Exception, doing: str = "") -> str | None:
    """Returns the message for an error: its type, its text, and the user's last line before it.

    Args:
      error: The error as caught.
      doing: The action that failed, for errors that do not state it.

    Returns:
      The message; None if neither the input nor the user's code is known to have caused the error.

    Example:
      >>> explain_error(TypeError("an int is no flax model"), "model 'a:b' cannot be planned")
      "model 'a:b' cannot be planned: an int is no flax model"
      >>> explain_error(KeyError("a bug"), "model 'a:b' cannot be planned") is None
      True
    """
    if isinstance(error, ConfigError | ModelError):
        frame = last_frame(error.__cause__) if error.__cause__ else None
        return f"{error}\n{_place(frame)}" if frame else str(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        cause = str(error).partition("\n\nSuspected Python Code Location")[0]
        remedy = f"Another version of jax may, or {_TRITON}."
        return f"{doing}: XLA does not compile it. {remedy}\n{cause.rstrip()}"
    if isinstance(error, RuntimeError) and _TOO_LARGE in str(error):
        shape = str(error).partition(_TOO_LARGE)[2].rstrip(".")
        return f"{doing}: an array of {shape} is larger than XLA allows: pass fewer tokens or rows"
    if (frame := last_frame(error)) is not None:
        return f"{doing}:\n{type(error).__name__}: {error}\n{_place(frame)}"
    if not isinstance(error, ValueError | TypeError | ImportError | RuntimeError):
        return None
    return f"{doing}: {error}" if doing else str(error)


def last_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame outside of Python, JAX, Flax, optax, numpy and zerojax."""
    libraries = [_folder(name) for name in _LIBRARIES]
    python = Path(sysconfig.get_path("stdlib"))

    def is_user_code(frame: traceback.FrameSummary) -> bool:
        path = Path(frame.filename)
        if frame.filename.startswith("<") or any(path.is_relative_to(x) for x in libraries if x):
            return False
        return not path.is_relative_to(python) or "site-packages" in path.parts

    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_user_code(each)]
    return frames[-1] if frames else None


def _place(frame: traceback.FrameSummary) -> str:
    """Formats a frame as Python does."""
    where = f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    return f"{where}\n    {frame.line}" if frame.line else where


def _folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None
