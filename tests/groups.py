"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable

LIMIT = 600.0  # s that a test waits at most, which a machine of any load stays below


def wait_for(condition: Callable[[], bool], told: Callable[[], str]) -> None:
    """Returns when a condition holds; AssertionError with what ``told`` tells after ``LIMIT``."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, told()
        time.sleep(0.02)
