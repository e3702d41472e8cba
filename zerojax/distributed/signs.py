"""Signs of life that the processes of a job send each other, with their activity."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from zerojax.xla import compat

_KEY = "zerojax/signs/"


class Sign(NamedTuple):
    """A sign of life of a process.

    Attributes:
      word: Differs from sign to sign; after the space the process's activity in place of steps.
      seen: Time at which this process first saw the sign, in s of ``time.monotonic``.
    """

    word: str
    seen: float


class Signs:
    """The signs of all processes, sent through the coordinator.

    Each process measures the ages of signs by its own clock, as clocks of hosts differ. A
    coordinator that does not answer shows as a process 0 without a sign.
    """

    def __init__(self) -> None:
        self._me, self._count = jax.process_index(), jax.process_count()
        self._given = 0
        self._signs: dict[int, Sign] = {}
        self._since = 0.0

    def give(self, busy: str, seconds: float) -> None:
        """Sends a sign of this process.

        Args:
          busy: The process's activity in place of steps; empty for none.
          seconds: Seconds that the coordinator may take.
        """
        self._given += 1
        word = f"{self._given} {busy}"
        if self._count > 1:
            key = f"{_KEY}{self._me}"
            within(seconds, lambda: compat.coordination().key_value_set(key, word, True))
        self._signs[self._me] = Sign(word, time.monotonic())

    def look(self, seconds: float) -> None:
        """Reads the signs of the others, and compares them with those of earlier calls."""
        self._since = self._since or time.monotonic()
        if self._count == 1:
            return
        entries = within(seconds, lambda: compat.coordination().key_value_dir_get(_KEY)) or []
        for key, word in entries:
            process = int(key.rpartition("/")[2])
            if process not in self._signs or self._signs[process].word != word:
                self._signs[process] = Sign(word, time.monotonic())

    def look_away(self) -> None:
        """Forgets all signs, until the next :meth:`look`."""
        self._signs, self._since = {}, 0.0

    @property
    def watched(self) -> float:
        """Seconds since the first :meth:`look`; 0 if there was none."""
        return time.monotonic() - self._since if self._since else 0.0

    def missing(self, seconds: float) -> list[int]:
        """Returns the processes without a new sign for more than ``seconds``."""
        now = time.monotonic()
        late = Sign("", -seconds)
        return [i for i in range(self._count) if now - self._signs.get(i, late).seen > seconds]

    def busy(self) -> set[str]:
        """Returns the activities of the processes in place of steps."""
        return {sign.word.partition(" ")[2] for sign in self._signs.values()} - {""}


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Returns the coordinator's answer; None if ``ask`` fails or takes longer than ``seconds``."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        answer = None
        with contextlib.suppress(RuntimeError):  # JaxRuntimeError is one
            answer = ask()
        answers.put(answer)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return None
