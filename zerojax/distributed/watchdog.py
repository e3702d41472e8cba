"""A watchdog that ends a stalled job and writes the stacks of all threads of its processes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from zerojax.distributed.broadcast import Broadcast
from zerojax.distributed.exchange import format_processes
from zerojax.distributed.signs import Signs, within
from zerojax.xla import compat

STALLED = 76
"""Exit status of a process that the watchdog ended."""

_FIRST = 1800.0  # s: compiles, restores and data before the steps have a pace
_LEAST = 300.0  # s
_STEPS = 30  # of median duration
_LONGEST = 3600.0  # s that compiles and saves may add between two steps
_TICK = 15.0  # s at most; otherwise an eighth of the limit
_GRACE = 3.0  # s in which the processes write their stacks
_DEBUGGER = "a debugger"


class Watchdog(threading.Thread):
    """Thread that ends all processes of the job, with status 76, when no step ends any more.

    A step (or an evaluation) has ended when the devices have its results; the main thread may be
    blocked in a collective. While all processes give signs of life and one compiles, saves,
    restores or is debugged, the watchdog waits: for an hour at most, but for ever for a debugger.
    Before the end each process writes the stacks of all its threads to stderr and to
    ``ZEROJAX_RUN_DIR/stacks.INDEX``. A stopped process can do neither; the others print its index.

    Args:
      seconds: The longest time without the end of a step, once the first has begun. None: 30 steps
        of median duration, five minutes at least, and half an hour before their pace is known.
      folder: Folder of ``stacks.INDEX``; None writes only to stderr.
    """

    def __init__(self, seconds: float | None, folder: Path | None) -> None:
        super().__init__(name="zerojax watchdog", daemon=True)
        self._seconds, self._folder = seconds, folder
        self._me, self._count = jax.process_index(), jax.process_count()
        self._results: deque[Any] = deque(maxlen=1024)  # scalars of calls that may not have ended
        self._paces: deque[float] = deque(maxlen=64)  # s
        self._last, self._added = time.monotonic(), 0.0
        self._begun = False
        self._pauses: list[str] = []
        self._signs = Signs()
        self._over, self._ending = threading.Event(), threading.Lock()
        self._alarm = Broadcast("watchdog", self._hear) if self._count > 1 else None

    def begin(self) -> None:
        """Expects steps from now on."""
        if not self._begun:
            self._begun, self._last = True, time.monotonic()

    def ran(self, results: Any) -> None:
        """Records a step's results, ready or not. A step without a scalar counts as ended."""
        leaves = jax.tree.leaves(results)
        self._results.append(next((x for x in leaves if _is_scalar(x)), None))

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Marks a block in which no step is expected, such as "a save"."""
        self._pauses.append(what)
        try:
            yield
        finally:
            self._pauses.remove(what)
            self._last = time.monotonic()

    def stop(self) -> None:
        """Stops the watchdog."""
        atexit.unregister(self.stop)
        self._over.set()
        if threading.current_thread() is not self:
            self.join(5)
        faulthandler.cancel_dump_traceback_later()
        if self._alarm:
            self._alarm.close()

    @property
    def stopped(self) -> bool:
        return self._over.is_set()

    def run(self) -> None:
        """Runs the thread."""
        atexit.register(self.stop)
        while not self._over.wait(min(_TICK, (self._seconds or self.limit()) / 8)):
            if self._count > 1 and not jax.distributed.is_initialized():
                self.stop()  # the job is over, and only this process runs on
                return
            # Ends a process in which no Python thread runs, as one keeps the interpreter lock.
            faulthandler.dump_traceback_later(1.5 * self.limit() + 5, exit=True, file=2)
            self._look()

    def _look(self) -> None:
        self.take_results()
        silence, limit = time.monotonic() - self._last, self.limit()
        self._signs.give(self._busy(), limit / 8)
        if silence < limit / 2:
            self._signs.look_away()
            return
        self._signs.look(limit / 8)
        if silence < limit or self._signs.watched < 0.45 * limit:
            return
        missing, busy = self._signs.missing(0.4 * limit), self._signs.busy()
        if busy and not missing and (_DEBUGGER in busy or self._added < _LONGEST):
            self._last += silence
            self._added += silence
        else:
            self._end(_cause(self._me, silence, limit, missing, self._count), missing)

    def limit(self) -> float:
        """Returns the longest time without the end of a step, in s."""
        if self._begun and self._seconds is not None:
            return self._seconds
        if not self._begun or len(self._paces) < 3:
            return _FIRST
        return max(_LEAST, _STEPS * statistics.median(self._paces))

    def take_results(self) -> None:
        ended = 0
        while self._results and _has_ended(self._results[0]):
            self._results.popleft()
            ended += 1
        if ended:
            now = time.monotonic()
            self._paces.append((now - self._last) / ended)
            self._last, self._added = now, 0.0

    def _busy(self) -> str:
        """Returns the process's activity in place of steps; empty for none."""
        frames = [*compat.frames()]
        if {"debugpy", "pydevd"} & sys.modules.keys() or any(x.f_trace for x in frames):
            return _DEBUGGER
        if self._pauses:
            return self._pauses[0]
        return "a compile" if any(map(compat.compiles, frames)) else ""

    def _hear(self, word: str) -> None:
        missing, _, cause = word.partition(";")
        self._end(cause, [*map(int, missing.split())])

    def _end(self, cause: str, missing: list[int]) -> None:
        """Alerts the other processes, writes the stacks, and ends this process."""
        if self.stopped or not self._ending.acquire(blocking=False):
            return
        deadline = time.monotonic() + _GRACE
        alarm = None if 0 in missing else self._alarm  # an alarm needs the coordinator
        if alarm:
            message = f"{' '.join(map(str, missing))};{cause}"
            within(_GRACE / 3, lambda: alarm.send(message))
        self._write_stacks(f"zerojax: {cause} This is process {self._me}; status {STALLED}.\n")
        if alarm:
            within(_GRACE / 3, lambda: alarm.set(f"written/{self._me}", ""))
        while alarm and time.monotonic() < deadline:
            written = within(_GRACE / 3, lambda: alarm.words("written/")) or ()
            if len(written) >= self._count - len(missing):
                break
            time.sleep(0.05)
        if alarm and self._me == 0:
            time.sleep(0.5)  # without the coordinator JAX aborts the others
        os._exit(STALLED)

    def _write_stacks(self, about: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, about.encode())
            faulthandler.dump_traceback(file=2)
        if self._folder is None:
            return
        with contextlib.suppress(OSError), open(self._folder / f"stacks.{self._me}", "w") as file:
            file.write(about)
            file.flush()
            faulthandler.dump_traceback(file=file)


def watchdog() -> Watchdog | None:
    """Returns this process's watchdog, which the first call starts; None if the watchdog is off.

    The watchdog is on if there are several processes, or if ``ZEROJAX_WATCHDOG`` is a number of
    seconds; ``ZEROJAX_WATCHDOG=off`` turns it off.

    Raises:
      ValueError: ``ZEROJAX_WATCHDOG`` is neither a number above 0 nor "off".
    """
    text = os.environ.get("ZEROJAX_WATCHDOG", "")
    is_joined = jax.distributed.is_initialized() and jax.process_count() > 1
    if text == "off" or not (text or is_joined):
        return None
    for thread in threading.enumerate():  # Python lists the threads; zerojax keeps no globals
        if isinstance(thread, Watchdog) and not thread.stopped:
            return thread
    try:
        seconds = float(text) if text else None
        if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
            raise ValueError
    except ValueError:
        raise ValueError(f"ZEROJAX_WATCHDOG={text}: seconds above 0, or off") from None
    folder = os.environ.get("ZEROJAX_RUN_DIR")
    started = Watchdog(seconds, Path(folder) if folder else None)
    started.start()
    return started


@contextlib.contextmanager
def paused(what: str) -> Iterator[None]:
    """Marks a block in which the watchdog expects no step, such as "an export"; an hour at most.

    A pause in one process is enough; saves, restores and compiles need no pause.

    Example:
      >>> with paused("an upload"):
      ...     pass
    """
    running = watchdog()
    with running.paused(what) if running else contextlib.nullcontext():
        yield


def _is_scalar(x: Any) -> bool:
    return hasattr(x, "is_ready") and not x.shape


def _has_ended(x: Any) -> bool:
    try:
        return x is None or x.is_deleted() or x.is_ready()
    except RuntimeError:  # deleted in between
        return True


def _cause(me: int, silence: float, limit: float, missing: list[int], count: int) -> str:
    detail = f" All {count} processes are alive." if count > 1 else ""
    if 0 in missing:
        detail = " Process 0, the coordinator, does not answer."
    elif missing:
        detail = f" No sign of life from {format_processes(missing)}."
    return (
        f"no step has ended for {silence:.3g} s, ZEROJAX_WATCHDOG is {limit:.3g} s, as process "
        f"{me} sees.{detail}"
    )
