"""The end of a process whose script has ended, in the midst of others."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time

import jax

from zerojax.distributed.exchange import named
from zerojax.xla import compat

_KEY = "zerojax/left/"
_QUIET = 5.0  # s


def leave_together() -> None:
    """Has this process, once its script has ended, wait for the scripts of the others.

    In JAX's own shutdown nobody learns who is waited for, and after 300 s all abort.
    """
    atexit.register(_wait)  # before JAX's shutdown, which was registered earlier


def _wait() -> None:
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    me = jax.process_index()
    with contextlib.suppress(RuntimeError):  # the coordinator is gone, a step has failed
        for x in jax.live_arrays():  # of steps that the others run as well
            x.block_until_ready()
        compat.coordination().key_value_set(f"{_KEY}{me}", "")
        begun, said = time.monotonic(), False
        while others := {*range(jax.process_count())} - left():
            if not said and time.monotonic() - begun > _QUIET:
                said = True
                text = f"zerojax: the script of process {me} has ended; waiting for {named(others)}"
                print(text, file=sys.stderr, flush=True)
            time.sleep(0.1)


def left() -> set[int]:
    """The processes whose scripts have ended.

    Raises:
      JaxRuntimeError: The coordinator is gone.
    """
    there = compat.coordination().key_value_dir_get(_KEY)
    return {int(key.rpartition("/")[2]) for key, _ in there}
