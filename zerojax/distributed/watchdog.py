"""A watchdog that ends a stalled job and writes the stacks of all threads of its processes."""

from __future__ import annotations

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
from typing import Any, NoReturn

import jax

from zerojax.distributed.coordinator import Coordinator, coordinator, part
from zerojax.distributed.roll_call import format_indices
from zerojax.xla import compat

STALLED = 76
"""Exit status of a process that the watchdog ended."""

_FIRST = 1800.0  # s: compiles, restores and data before the steps have a pace
_LEAST = 300.0  # s
_STEPS = 30  # of median duration
_LONGEST = 3600.0  # s that compiles and saves may add between two steps
_TICK = 15.0  # s at most; otherwise an eighth of the limit
_GRACE = 15.0  # s in which the processes write their stacks
_DEBUGGER = "a debugger"
_SIGNS, _STALLED, _WRITTEN = "signs", "stalled", "stacks are written"


class _Signs:
    """Signs of life that the processes of a job send each other, with their activity.

    Each process measures the ages of signs by its own clock, as clocks of hosts differ. If process
    0 does not answer, no process has a new sign.
    """

    def __init__(self, this: Coordinator) -> None:
        self._coordinator, self._given = this, 0
        self._signs: dict[int, tuple[str, float]] = {}  # the last of a process, and when it came
        self._since = 0.0

    def exchange(self, busy: str, look: bool) -> None:
        """Sends a sign of this process, and reads those of the others.

        Args:
          busy: The process's activity in place of steps; empty for none.
          look: Whether to read; otherwise all signs are forgotten.
        """
        this, now = self._coordinator, time.monotonic()
        self._given += 1
        words = {this.me: f"{self._given} {busy}"}
        if this.count > 1 and this.answers:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                this.publish(_SIGNS, words[this.me])
                words |= this.collect(_SIGNS) if look else {}
        if not look:
            self._signs = {}
        self._since = (self._since or now) if look else 0.0
        for process, word in words.items():
            if self._signs.get(process, ("",))[0] != word:
                self._signs[process] = word, now

    def watched(self) -> float:
        """Returns the seconds since the first look; 0 if there was none."""
        return time.monotonic() - self._since if self._since else 0.0

    def missing(self, seconds: float) -> list[int]:
        """Returns the processes without a new sign for more than ``seconds``."""
        oldest = time.monotonic() - seconds
        return [
            process
            for process in range(self._coordinator.count)
            if process not in self._signs or self._signs[process][1] < oldest
        ]

    def busy(self) -> set[str]:
        """Returns the activities of the processes in place of steps."""
        return {word.partition(" ")[2] for word, _ in self._signs.values()} - {""}


class Watchdog:
    """A check that ends all processes of the job, with status 76, when no step ends any more.

    A step (or an evaluation) has ended when the devices have its results; the main thread may be
    blocked in a collective. While all processes give signs of life and one compiles, saves,
    restores or is debugged, the watchdog waits: for an hour at most, but forever for a debugger.
    Before the end each process writes the stacks of all its threads to stderr and to
    ``ZEROJAX_RUN_DIR/stacks.INDEX``. A stopped process can do neither; the others print its index.

    Args:
      this: The coordinator of this process.
      seconds: The longest time without the end of a step, once the first has begun. None: 30 steps
        of median duration, five minutes at least, and half an hour before their pace is known.
      folder: Folder of ``stacks.INDEX``; None writes only to stderr.
    """

    def __init__(self, this: Coordinator, seconds: float | None, folder: Path | None) -> None:
        self._coordinator, self._seconds, self._folder = this, seconds, folder
        self._me, self._count = this.me, this.count
        # Scalars of calls that may not have ended.
        self._results: deque[jax.Array | None] = deque(maxlen=1024)
        self._paces: deque[float] = deque(maxlen=64)  # s
        self._last, self._added = time.monotonic(), 0.0
        self._begun = False
        self._pauses: list[str] = []
        self._signs = _Signs(this)
        this.every(self._look, offline=True)
        if self._count > 1:
            this.every(self._hear)

    def begin(self) -> None:
        """Expects steps from now on."""
        if not self._begun:
            self._begun, self._last = True, time.monotonic()

    def ran(self, results: object) -> None:
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

    def _look(self) -> float:
        # Ends a process in which no Python thread runs, as one keeps the interpreter lock.
        faulthandler.dump_traceback_later(1.5 * self.limit() + 5, exit=True, file=2)
        self.take_results()
        silence, limit = time.monotonic() - self._last, self.limit()
        self._signs.exchange(self._busy(), look=silence >= limit / 2)
        period = min(_TICK, (self._seconds or limit) / 8)
        if silence < limit or self._signs.watched() < 0.45 * limit:
            return period
        missing, busy = self._signs.missing(0.4 * limit), self._signs.busy()
        if busy and not missing and (_DEBUGGER in busy or self._added < _LONGEST):
            self._last += silence
            self._added += silence
        else:
            self._end(_cause(self._me, silence, limit, missing, self._count), missing)
        return period

    def limit(self) -> float:
        """Returns the longest time without the end of a step, in s."""
        if self._begun and self._seconds is not None:
            return self._seconds
        if not self._begun or len(self._paces) < 3:
            return _FIRST
        return max(_LEAST, _STEPS * statistics.median(self._paces))

    def take_results(self) -> None:
        """Counts the recorded steps that have ended since the last call, and their pace."""
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

    def _hear(self) -> float:
        """Ends this process if another has published that the job is stalled."""
        for word in self._coordinator.collect(_STALLED).values():
            missing, _, cause = word.partition(";")
            self._end(cause, [*map(int, missing.split())])
        return self._coordinator.tick

    def _end(self, cause: str, missing: list[int]) -> NoReturn:
        """Alerts the other processes, writes the stacks, and ends this process."""
        this = self._coordinator
        deadline = time.monotonic() + this.tick + _GRACE
        has_others = self._count > 1 and 0 not in missing
        about = f"zerojax: {cause} This is process {self._me}; status {STALLED}.\n"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if has_others:
                this.publish(_STALLED, f"{' '.join(map(str, missing))};{cause}")
        self._write_stacks(about)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if has_others:
                this.publish(_WRITTEN, "")
                present = self._count - len(missing)
                while time.monotonic() < deadline and len(this.collect(_WRITTEN)) < present:
                    time.sleep(0.05)
                part(self._me, present - 1, _GRACE)
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
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = float("nan")
    if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"ZEROJAX_WATCHDOG={text}: set seconds above 0, or off")
    folder = os.environ.get("ZEROJAX_RUN_DIR")
    return coordinator().only(Watchdog, seconds, Path(folder) if folder else None)


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
        detail = f" No sign of life from {format_indices(missing, 'process')}."
    return (
        f"no step has ended for {silence:.3g} s, ZEROJAX_WATCHDOG is {limit:.3g} s, as process "
        f"{me} sees.{detail}"
    )
