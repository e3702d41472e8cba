"""Python's garbage collector while a program is traced and lowered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_CONTAINERS = 100_000


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Looks for garbage once in 100,000 new containers, not in each 700 as Python's default is.

    A trace makes millions of containers and keeps most of them. Looking through them again and
    again takes a quarter of the time to trace a large step, and what 100,000 hold is little. A
    collector that the program has turned off, or made rarer still, stays so.
    """
    youngest, *older = gc.get_threshold()
    if not 0 < youngest < _CONTAINERS:
        yield
        return
    gc.set_threshold(_CONTAINERS, *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)
