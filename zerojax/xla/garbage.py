"""Python's garbage collector while a program is traced and lowered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_CONTAINERS = 100_000


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Collects garbage once per 100,000 new containers, not once per 700 as Python's default does.

    A collector that the program has turned off, or set to run even less often, is left unchanged.
    """
    youngest, *older = gc.get_threshold()
    if not 0 < youngest < _CONTAINERS:
        yield
        return
    # A trace creates millions of containers and keeps most of them. Scanning them repeatedly takes
    # a quarter of the time to trace a large step; 100,000 of them hold little memory.
    gc.set_threshold(_CONTAINERS, *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)
