"""The user's line that an equation comes from, for messages and tables of this and later rooms."""

from __future__ import annotations

import traceback as tracebacks
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from zerojax.xla import jaxprs
from zerojax.xla.types import Equation

_PACKAGE = PurePath(__file__).parent.parent


def where(eqn: Equation) -> str:
    """Returns the equation's primitive and, if known, the user's line that it comes from."""
    place = line(jaxprs.source(eqn).traceback)
    return f"{eqn.primitive.name} at {place}" if place else eqn.primitive.name


def line(traceback: Any, *, models: bool = False) -> str | None:
    """Returns the innermost line outside of libraries, as "file.py:7". With ``models``, zerojax's
    own models count as the user's code."""
    frames = traceback.frames if traceback is not None else ()
    return _innermost(((frame.file_name, frame.line_num) for frame in frames), models=models)


def raised_at(error: BaseException) -> str | None:
    """Returns the innermost line outside of libraries in an error's traceback."""
    frames = tracebacks.extract_tb(error.__traceback__)
    return _innermost((frame.filename, frame.lineno) for frame in reversed(frames))


def _innermost(frames: Iterable[tuple[str, int | None]], *, models: bool = False) -> str | None:
    for name, number in frames:
        file = PurePath(name)
        library = "site-packages" in file.parts or "dist-packages" in file.parts
        standard = any(part.startswith("python3.") for part in file.parts)
        is_zerojax = file.is_relative_to(_PACKAGE)
        is_zerojax = is_zerojax and not (models and file.is_relative_to(_PACKAGE / "models"))
        if not library and not standard and not is_zerojax:
            return f"{file.name}:{number}"
    return None
