"""One thread per process through which the processes of a job watch and compare each other."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from zerojax.distributed.roll_call import format_indices
from zerojax.xla import compat

_T = TypeVar("_T")

_TICK = 1.0  # s
_PROCESSES_PER_TICK = 256  # more processes look less often, as process 0 answers all of them
ANSWER = 2.0  # s that process 0 may take to answer
_QUIET = 5.0  # s before a process whose script has ended prints for which it waits
_UP, _ENDED, _PARTED = "up", "ended", "parted"


@dataclass
class _Check:
    """A function that the thread calls, and the time of its next call."""

    look: Callable[[], float]
    offline: bool
    due: float = 0.0


class Coordinator(threading.Thread):
    """The thread that runs all checks among the processes, and the texts that they share.

    A text is stored under ``zerojax/TOPIC/ROUND/PROCESS`` by the coordination service of
    ``jax.distributed``, which process 0 runs. Rounds count from 1; a topic without rounds has round
    0. Only :meth:`wait` has a timeout, so the thread first waits for a text that exists: it does
    not hang in a check where process 0 is stopped.

    Args:
      client: The client of the coordination service; None in a single process.

    Attributes:
      me: Index of this process.
      count: Number of processes.
      tick: Seconds between looks at what other processes may publish at any moment.
      answers: Whether process 0 answers.
      ended: Whether the script of this process has ended.
    """

    client: Any
    me: int
    count: int
    tick: float
    answers: bool
    ended: bool

    def __init__(self, client: Any = None) -> None:
        super().__init__(name="zerojax coordinator", daemon=True)
        self.client, self.me, self.count = client, jax.process_index(), jax.process_count()
        self.tick = _TICK * max(1.0, self.count / _PROCESSES_PER_TICK)
        self.answers, self.ended = True, False
        self._checks: list[_Check] = []
        self._rounds: Counter[str] = Counter()
        self._shared: dict[Callable[..., Any], Any] = {}
        self._is_leaving = threading.Event()
        self._waits, self._ended_at, self._has_reported = True, 0.0, False
        if client is not None:
            self.publish(_UP, "")

    def publish(self, topic: str, text: str, number: int = 0) -> None:
        """Stores this process's text in a round of a topic, in place of an earlier text."""
        self.client.key_value_set(_key(topic, number, self.me), text, True)

    def collect(self, topic: str, number: int = 0) -> dict[int, str]:
        """Returns the texts of a round by process, of those that have published one."""
        entries = self.client.key_value_dir_get(_key(topic, number))
        return {int(key.rpartition("/")[2]): text for key, text in entries}

    def wait(self, topic: str, number: int, process: int, seconds: float) -> str | None:
        """Returns the text of a process; None if there is none within ``seconds``."""
        key = _key(topic, number, process)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found: str = self.client.blocking_key_value_get(key, max(1, round(1000 * seconds)))
            return found
        return None

    def delete(self, topic: str, number: int) -> None:
        """Deletes this process's text of a round."""
        self.client.key_value_delete(_key(topic, number, self.me))

    def next_round(self, topic: str) -> int:
        """Returns the next round, from 1, of a topic whose rounds all begin in the same order."""
        self._rounds[topic] += 1
        return self._rounds[topic]

    def every(self, look: Callable[[], float], *, offline: bool = False) -> None:
        """Calls ``look`` in the thread, which returns the seconds until its next call.

        Args:
          look: The check. An error of the coordination service in a check is ignored.
          offline: Whether to call ``look`` also while process 0 does not answer.
        """
        self._checks = [*self._checks, _Check(look, offline)]

    def forget(self, look: Callable[[], float]) -> None:
        """Removes a check."""
        self._checks = [check for check in self._checks if check.look != look]

    def only(self, kind: Callable[..., _T], *arguments: object) -> _T:
        """Returns this process's only ``kind(self, *arguments)``, which the first call creates."""
        if kind not in self._shared:
            self._shared[kind] = kind(self, *arguments)
        found: _T = self._shared[kind]
        return found

    def leave(self) -> None:
        """Waits until the scripts of all processes have ended, and ends the thread.

        JAX's shutdown does not print which processes it waits for, and after 300 s all abort.
        """
        atexit.unregister(self.leave)
        self.ended = True
        if self.client is not None and self.client is _client():
            try:
                for array in jax.live_arrays():  # from steps that the others run as well
                    array.block_until_ready()
            except RuntimeError:  # a step has failed, perhaps because the others are gone
                self._waits = False
        self._is_leaving.set()
        self.join()  # a thread that the interpreter ends inside jaxlib aborts the process

    def run(self) -> None:
        """Runs the thread until the scripts of all processes have ended."""
        while self.client is _client():
            is_leaving = self._is_leaving.is_set()
            self.answers = self.client is None or self.wait(_UP, 0, self.me, ANSWER) is not None
            pause = self._look(everything=is_leaving)
            if not is_leaving:
                self._is_leaving.wait(pause)
            elif self._have_all_ended():
                self._look(everything=True)  # at what the others published before they ended
                break
        faulthandler.cancel_dump_traceback_later()  # the watchdog's

    def _look(self, everything: bool) -> float:
        """Calls the checks that are due; returns the seconds until the next of them is due."""
        for check in self._checks:
            now = time.monotonic()
            if everything or check.due <= now:
                check.due = now + self.tick
                if self.answers or check.offline:
                    with contextlib.suppress(jax.errors.JaxRuntimeError):
                        check.due = now + check.look()
        now = time.monotonic()
        return max(0.0, min([self.tick, *(check.due - now for check in self._checks)]))

    def _have_all_ended(self) -> bool:
        """Publishes that this script has ended; returns, after a pause, whether all have.

        Prints once for which processes this process waits.
        """
        if self.client is None or not self._waits:
            return True
        others = set(range(self.count))
        if self.answers:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.publish(_ENDED, "")
                others -= {*self.collect(_ENDED)}
        self._ended_at = self._ended_at or time.monotonic()
        waited = time.monotonic() - self._ended_at
        if others and waited > _QUIET and not self._has_reported:
            self._has_reported = True
            who = format_indices(sorted(others), "process")
            text = f"zerojax: the script of process {self.me} has ended; waiting for {who}"
            print(text, file=sys.stderr, flush=True)
        if others:
            time.sleep(min(self.tick, 0.1 + waited / 10))
        return not others


def coordinator() -> Coordinator:
    """Returns this process's coordinator, which the first call starts."""
    client = _client()
    for thread in threading.enumerate():  # Python lists the threads; zerojax keeps no globals
        if isinstance(thread, Coordinator) and thread.client is client:
            return thread
    started = Coordinator(client)
    started.start()
    atexit.register(started.leave)  # runs before JAX's shutdown, which was registered earlier
    return started


def part(me: int, others: int, seconds: float) -> None:
    """Returns when this process may end without JAX's shutdown: process 0 last.

    JAX aborts processes that have lost the coordination service of process 0. The other processes
    call this function when nothing is left to do.

    Args:
      me: Index of this process.
      others: Number of processes whose calls process 0 awaits.
      seconds: The longest time that process 0 waits for them.
    """
    client = _client()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if client is None:
            return
        if me:
            client.blocking_key_value_get(_key(_UP, 0, me), round(1000 * ANSWER))
            client.key_value_set(_key(_PARTED, 0, me), "", True)
            return
        deadline = time.monotonic() + seconds
        while len(client.key_value_dir_get(_key(_PARTED, 0))) < others:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        time.sleep(0.5)  # from their calls to their ends


def _client() -> Any:
    return compat.coordination() if jax.distributed.is_initialized() else None


def _key(topic: str, number: int, process: int | str = "") -> str:
    return f"zerojax/{topic}/{number}/{process}"
