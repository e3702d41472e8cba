"""A check that all processes call zerojax in the same order; its error names the call."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.distributed.coordinator import Coordinator, coordinator
from zerojax.distributed.equality import SAME_ARGUMENTS, are_computed, descriptions
from zerojax.distributed.failure import end_with
from zerojax.distributed.launched import LaunchError
from zerojax.xla import compat

TICK = 2.0
"""Seconds between two comparisons."""

_CALLS, _ALL_CALLS = "calls", "calls of an ended script"
_PUBLISHED, _KEPT = 64, 4096  # calls
_END = "the end of the program"


class Lockstep:
    """Compares the calls of all processes with those of process 0, every few seconds.

    If one process evaluates, saves or steps by itself, it waits for the others forever, or its
    collectives pair up with those of another call. The check never waits: process 0 publishes
    its last calls, and the others read them. A process that finds a difference ends with an error.
    So it does where the values that a call passes beside the batch differ.

    Args:
      this: The coordinator of this process.
      silent: Seconds after which a process reports that two processes are at different calls, and
        at which lines.
    """

    def __init__(self, this: Coordinator, silent: float = 60.0) -> None:
        self._coordinator, self._me, self._silent = this, this.me, silent
        self._lock = threading.Lock()
        self._count, self._sum = 0, 0
        self._calls: deque[tuple[int, str]] = deque(maxlen=_KEPT)  # checksum of all so far, name
        self._unread: deque[tuple[int, Mapping[str, object]]] = deque(maxlen=_KEPT)
        self._values: deque[tuple[int, dict[str, str]]] = deque(maxlen=_KEPT)
        self._published, self._has_ended = "", False
        self._still: dict[int, tuple[tuple[int, str, int], float]] = {}  # positions, since when
        this.every(self._look)

    def note(self, call: str) -> None:
        """Records a call that all processes must execute, before the call waits for any of them.

        Args:
          call: The call, in words.
        """
        with self._lock:
            self._count, self._sum = self._count + 1, zlib.crc32(call.encode(), self._sum)
            self._calls.append((self._sum, call))

    def note_values(self, values: Mapping[str, object]) -> None:
        """Records values of the last call by name, which must be equal in all processes.

        Nobody changes the arrays among them.
        """
        with self._lock:
            self._unread.append((self._count, values))

    def _look(self) -> float:
        """Publishes this process's calls, and compares them with those of other processes.

        Process 0 compares with the processes whose scripts have ended, the others with process 0.
        """
        if self._coordinator.ended and not self._has_ended:
            self._has_ended = True
            self.note(_END)
        self._read()
        if self._me == 0 or self._has_ended:
            text = self.snapshot()
            if text != self._published:
                self._coordinator.publish(_ALL_CALLS if self._me else _CALLS, text)
                self._published = text
        others = self._coordinator.collect(_CALLS if self._me else _ALL_CALLS)
        for process, text in others.items():
            self.compare(process, text)
        return TICK

    def _read(self) -> None:
        """Describes the values of calls, as far as the devices have computed them."""
        while self._unread:
            number, values = self._unread[0]
            try:
                if not are_computed(values.values()):
                    return
                self._values.append((number, descriptions(values)))
            except RuntimeError:  # deleted meanwhile, or the computation failed
                pass
            self._unread.popleft()

    def snapshot(self) -> str:
        """Returns the number of calls, the last of them, the main thread's line, and the last
        values, as JSON."""
        with self._lock:
            last = [*self._calls][-_PUBLISHED:], _place(), [*self._values][-_PUBLISHED:]
            return json.dumps([self._count, *last])

    def compare(self, process: int, description: str) -> None:
        """Ends this process if another process has executed other calls."""
        count, other_calls, place, values = json.loads(description)
        with self._lock:
            own_calls, number = [*self._calls], self._count
        first = max(count - len(other_calls), number - len(own_calls))
        for n in range(first, min(count, number)):
            own, other = own_calls[n - number], other_calls[n - count]
            if own[0] != other[0]:
                end_with(
                    LaunchError(
                        f"the processes call different functions: call {n + 1} of zerojax is "
                        f"{other[1]} in process {process}, at {place}, and {own[1]} in process "
                        f"{self._me}, at {_place()}. Run the same steps, evaluations, saves and "
                        "restores in every process; print and log in process 0 only"
                    )
                )
        own_values = dict(self._values)
        for n, others in values:
            for name, value in own_values.get(n, {}).items():
                if value != others.get(name):
                    end_with(
                        LaunchError(
                            f"{name} is {value} in process {self._me} and {others.get(name)} "
                            f"in process {process}, at call {n} of zerojax. {SAME_ARGUMENTS}"
                        )
                    )
        self._report_waiting(process, count, place, number)

    def _report_waiting(self, process: int, count: int, place: str, number: int) -> None:
        """Prints once where two processes are that have been at different calls for long."""
        positions, now = (count, place, number), time.monotonic()
        still, since = self._still.get(process, (None, now))
        if still != positions:
            self._still[process] = positions, now
        elif number > count and self._me > 1:
            return  # process 1 sees it too, and reports it
        elif count != number and now - since > self._silent:
            self._still[process] = positions, math.inf
            print(
                f"zerojax: process {process} has been at {place} for {self._silent:g} s, in or "
                f"after call {count} of zerojax, and process {self._me} is at {_place()}, call "
                f"{number}. If one reads an array that all devices hold, let all processes do "
                "so",
                file=sys.stderr,
                flush=True,
            )


def lockstep(mesh: Mesh | AbstractMesh) -> Lockstep | None:
    """Returns this process's only Lockstep, started by the first call; None unless the mesh has
    devices of all processes, and these are several."""
    if jax.process_count() == 1 or isinstance(mesh, AbstractMesh):
        return None
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        return None
    return coordinator().only(Lockstep)


def _place() -> str:
    """Returns the line of the user's program at which the main thread is."""
    library_paths = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__), "<")
    for frame in compat.frames(threading.main_thread().ident):
        file = frame.f_code.co_filename
        if not file.startswith(library_paths) and "site-packages" not in file:
            return f"{file}:{frame.f_lineno}"
    return "its end"
