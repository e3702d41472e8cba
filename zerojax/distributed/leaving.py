"""The exit of a process whose script has ended before the scripts of other processes."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time

import jax

from zerojax.distributed.exchange import format_processes
from zerojax.xla import compat

_KEY = "zerojax/left/"
_QUIET = 5.0  # s


class UntilAllHaveLeft(threading.Thread):
    """A thread that runs until the scripts of all processes have ended.

    Attributes:
      over: Set when all scripts have ended; ``run`` must return soon after, as a thread that the
        interpreter ends inside jaxlib aborts the process.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.over = threading.Event()


def leave_together() -> None:
    """Registers a wait, at the end of this process's script, for the scripts of the others.

    JAX's shutdown does not print which processes it waits for, and after 300 s all abort.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)  # before JAX's shutdown, which was registered earlier


def _leave() -> None:
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        _wait()
    for thread in threading.enumerate():
        if isinstance(thread, UntilAllHaveLeft):
            thread.over.set()
            thread.join(_QUIET)


def _wait() -> None:
    me = jax.process_index()
    with contextlib.suppress(RuntimeError):  # the coordinator is gone, a step has failed
        for array in jax.live_arrays():  # from steps that the others run as well
            array.block_until_ready()
        compat.coordination().key_value_set(f"{_KEY}{me}", "")
        start, has_reported = time.monotonic(), False
        while others := {*range(jax.process_count())} - _left():
            if not has_reported and time.monotonic() - start > _QUIET:
                has_reported = True
                waits = format_processes(others)
                text = f"zerojax: the script of process {me} has ended; waiting for {waits}"
                print(text, file=sys.stderr, flush=True)
            time.sleep(0.1)


def _left() -> set[int]:
    """Returns the processes whose scripts have ended."""
    entries = compat.coordination().key_value_dir_get(_KEY)
    return {int(key.rpartition("/")[2]) for key, _ in entries}
