"""A check that all processes call zerojax in the same order; its error names the call."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.distributed.launched import LaunchError
from zerojax.distributed.leaving import leave_together
from zerojax.xla import compat

_FIRST, _ENDED = "zerojax/calls/of/", "zerojax/calls/ended/"
_TICK = 2.0  # s
_PUBLISHED, _KEPT = 64, 4096  # calls
_END = "the end of the program"


class Lockstep(threading.Thread):
    """Compares the calls of all processes with those of process 0, every few seconds.

    If one process evaluates, saves or steps by itself, it waits for the others for ever, or its
    collectives pair up with those of another call. The check never waits: process 0 publishes
    its last calls, and the others read them. A process that finds a difference ends with an error.

    Args:
      silent: Seconds after which a process reports that two processes are at different calls, and
        at which lines.
    """

    def __init__(self, silent: float = 60.0) -> None:
        super().__init__(name="zerojax lockstep", daemon=True)
        self._silent = silent
        self._me, self._lock, self._over = jax.process_index(), threading.Lock(), threading.Event()
        self._count, self._sum = 0, 0
        self._calls: deque[tuple[int, str]] = deque(maxlen=_KEPT)  # checksum of all so far, name
        self._published = ""
        self._still: tuple[Any, float] = None, 0.0  # unchanged state, since when

    def note(self, call: str) -> None:
        """Records a call that all processes must execute, before the call waits for any of them."""
        with self._lock:
            self._count, self._sum = self._count + 1, zlib.crc32(call.encode(), self._sum)
            self._calls.append((self._sum, call))

    def run(self) -> None:
        """Runs the thread."""
        while not self._over.wait(_TICK):
            if not jax.distributed.is_initialized():
                return
            self._look()

    def _look(self) -> None:
        with contextlib.suppress(RuntimeError):  # the job is over
            if self._me == 0:
                self._publish(_FIRST)
            for key, word in compat.coordination().key_value_dir_get(
                _FIRST if self._me else _ENDED
            ):
                self.compare(int(key.rpartition("/")[2]), word)

    def snapshot(self) -> str:
        """Returns the number of calls, the last of them, and the main thread's line, as JSON."""
        with self._lock:
            return json.dumps([self._count, [*self._calls][-_PUBLISHED:], _place()])

    def _publish(self, folder: str) -> None:
        word = self.snapshot()
        if word != self._published:
            self._published = word
            compat.coordination().key_value_set(f"{folder}{self._me}", word, True)

    def compare(self, process: int, snapshot: str) -> None:
        """Ends this process if another process has executed other calls."""
        count, other_calls, place = json.loads(snapshot)
        with self._lock:
            own_calls, number = [*self._calls], self._count
        first = max(count - len(other_calls), number - len(own_calls))
        for n in range(first, min(count, number)):
            own, other = own_calls[n - number], other_calls[n - count]
            if own[0] != other[0]:
                self._report(n + 1, own[1], process, other[1], place)
        self._say_who_waits(process, count, place, number)

    def _report(self, number: int, own: str, process: int, other: str, place: str) -> None:
        error = LaunchError(
            f"the processes do not call the same: call {number} of zerojax is {other} in process "
            f"{process}, which is at {place}, and {own} in process {self._me}, which is at "
            f"{_place()}. Every process runs the same steps, evaluations, saves and restores, "
            "with the same numbers beside the batch; only process 0 need print and log"
        )
        sys.excepthook(LaunchError, error, None)
        sys.stderr.flush()
        os._exit(1)  # the main thread may wait for the others in a program that they do not run

    def _say_who_waits(self, process: int, count: int, place: str, number: int) -> None:
        """Prints once where two processes are that have been at different calls for long."""
        now, state = time.monotonic(), (process, count, place, number)
        if self._still[0] is None or (self._still[0][0] == process and self._still[0] != state):
            self._still = state, now
        elif self._still[0][0] != process or (number > count and self._me > 1):
            return  # one of the processes that see this reports it
        elif count != number and 0 < now - self._still[1] > self._silent:
            self._still = state, float("inf")
            print(
                f"zerojax: for {self._silent:g} s process {process} stands at {place}, in or after "
                f"call {count} of zerojax, and process {self._me} at {_place()}, call {number}. "
                "Where one computes or prints what the devices of all hold, all must do so",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Publishes and compares at the program's end; the last process to end compares all."""
        self._over.set()
        self.join(_TICK)
        if jax.distributed.is_initialized():
            self.note(_END)
            with contextlib.suppress(RuntimeError):
                self._publish(_ENDED if self._me else _FIRST)
            self._look()


def lockstep(mesh: Mesh | AbstractMesh) -> Lockstep | None:
    """Returns this process's only Lockstep, started by the first call; None unless the mesh has
    devices of all processes, and these are several."""
    if jax.process_count() == 1 or isinstance(mesh, AbstractMesh):
        return None
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        return None
    for thread in threading.enumerate():  # Python lists the threads; zerojax keeps no globals
        if isinstance(thread, Lockstep):
            return thread
    started = Lockstep()
    started.start()
    leave_together()
    atexit.register(started.end)  # runs before the wait for the others
    return started


def _place() -> str:
    """Returns the line of the user's program at which the main thread is."""
    library_paths = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__), "<")
    for frame in compat.frames(threading.main_thread().ident):
        file = frame.f_code.co_filename
        if not file.startswith(library_paths) and "site-packages" not in file:
            return f"{file}:{frame.f_lineno}"
    return "its end"
