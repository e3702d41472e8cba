"""The user's line that an equation comes from."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from zerojax.xla import jaxprs

_PACKAGE = PurePath(__file__).parent.parent


def where(eqn: Any) -> str:
    """The equation's primitive, and the user's line that makes it where that is known."""
    place = line(jaxprs.source(eqn).traceback)
    return f"{eqn.primitive.name} at {place}" if place else eqn.primitive.name


def line(traceback: Any) -> str | None:
    """The innermost line outside of libraries, as "file.py:7"."""
    for frame in traceback.frames if traceback is not None else ():
        file = PurePath(frame.file_name)
        library = "site-packages" in file.parts or "dist-packages" in file.parts
        standard = any(part.startswith("python3.") for part in file.parts)
        if not library and not standard and not file.is_relative_to(_PACKAGE):
            return f"{file.name}:{frame.line_num}"
    return None
