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
from zerojax.distributed.exchange import ProcessesMissing, gather
from zerojax.distributed.roll_call import format_indices
from zerojax.xla import compat

STALLED = 76
"""Exit status of a process that the watchdog ended."""

_FIRST = 1800.0  # s: compiles, restores and data before the steps have a pace
_LEAST = 300.0  # s
_STEPS = 30  # of median duration
_LONGEST = 3600.0  # s that compiles and saves may add between two steps
_TICK = 15.0  # s at most; otherwise an eighth of the limit
_GRACE = 10.0  # s in which the processes write their stacks
_DEBUGGER = "a debugger"
_ACTIVITY, _STALLED, _WRITTEN = "activity", "stalled", "the stacks"


class Watchdog:
    """A check that ends all processes of the job, with status 76, when no step ends any more.

    A step (or an evaluation) has ended when the devices have its results; the main thread may be
    blocked in a collective. While one process compiles, saves, restores or is debugged, the
    watchdog waits: for an hour at most, but forever for a debugger. Before the end each process
    writes the stacks of all its threads to stderr and to ``ZEROJAX_RUN_DIR/stacks.INDEX``. A
    stopped process can do neither; the others print its index, unless JAX's heartbeat, which no
    stopped process sends, has ended them before.

    Args:
      this: The coordinator of this process.
      seconds: The longest time without the end of a step, once the first has begun. None: 30 steps
        of median duration, five minutes at least, and half an hour before their pace is known.
      folder: Folder of ``stacks.INDEX``; None writes only to stderr.
    """

    def __init__(self, this: Coordinator, seconds: float | None, folder: Path | None) -> None:
        self._coordinator, self._seconds, self._folder = this, seconds, folder
        # Scalars of calls that may not have ended.
        self._results: deque[jax.Array | None] = deque(maxlen=1024)
        self._paces: deque[float] = deque(maxlen=64)  # s
        self._last, self._added = time.monotonic(), 0.0
        self._begun = False
        self._pauses: list[str] = []
        self._published = ""  # this process's last activity
        this.every(self._look, offline=True)
        if this.count > 1:
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
        activities = self._activities(all_processes=silence >= limit)
        if silence >= limit:
            if activities and (_DEBUGGER in activities or self._added < _LONGEST):
                self._last += silence
                self._added += silence
            else:
                self._end(
                    f"no step has ended for {silence:.3g} s, ZEROJAX_WATCHDOG is {limit:.3g} s, as "
                    f"process {self._coordinator.me} sees."
                )
        return min(_TICK, (self._seconds or limit) / 8)

    def _activities(self, all_processes: bool) -> set[str]:
        """Publishes this process's activity in place of steps; returns it, or those of all."""
        this, own = self._coordinator, self._busy()
        found = {own}
        if this.count > 1 and this.answers:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                if own != self._published:
                    this.publish(_ACTIVITY, own)
                    self._published = own
                found |= {*this.collect(_ACTIVITY).values()} if all_processes else set()
        return found - {""}

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
        for cause in self._coordinator.collect(_STALLED).values():
            self._end(cause)
        return self._coordinator.tick

    def _end(self, cause: str) -> NoReturn:
        """Alerts the other processes, writes the stacks, and ends this process."""
        this, outputs = self._coordinator, [2]
        with contextlib.suppress(OSError):
            if self._folder is not None:
                path = self._folder / f"stacks.{this.me}"
                outputs.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if this.count > 1 and this.answers:
                this.publish(_STALLED, cause)
        _write(outputs, f"zerojax: {cause} This is process {this.me}; status {STALLED}.")
        for output in outputs:
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(file=output)
        if this.count > 1:
            missing = self._missing()
            who = f"All {this.count} processes are alive."
            if missing:
                who = f"No sign of life from {format_indices(missing, 'process')}."
            if 0 in missing:
                who = "Process 0, the coordinator, does not answer."
            _write(outputs, f"zerojax: {who}")
            if 0 not in missing:
                part(this.me, this.count - 1 - len(missing), _GRACE)
        os._exit(STALLED)

    def _missing(self) -> list[int]:
        """Waits until all processes have written their stacks; returns those that have not."""
        this = self._coordinator
        try:
            if not this.answers:
                return [0]
            gather(this, _WRITTEN, 1, "", this.tick + _GRACE)
        except ProcessesMissing as error:
            return error.missing
        except jax.errors.JaxRuntimeError:
            return [0]
        return []


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


def _write(outputs: list[int], text: str) -> None:
    for output in outputs:
        with contextlib.suppress(OSError):
            os.write(output, f"{text}\n".encode())
