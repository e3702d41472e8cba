"""Signs of life that the processes of a job send each other, with their activity."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

import jax

from zerojax.distributed.coordinator import Coordinator

_TOPIC = "signs"


class Sign(NamedTuple):
    """A sign of life of a process.

    Attributes:
      word: A number that differs from sign to sign, a space, and the process's activity in place of
        steps.
      seen: Time at which this process first saw the sign, in s of ``time.monotonic``.
    """

    word: str
    seen: float


class Signs:
    """The signs of all processes.

    Each process measures the ages of signs by its own clock, as clocks of hosts differ. If process
    0 does not answer, no process has a new sign.
    """

    def __init__(self, this: Coordinator) -> None:
        self._coordinator = this
        self._given = 0
        self._signs: dict[int, Sign] = {}
        self._since = 0.0

    def give(self, busy: str) -> None:
        """Sends a sign of this process.

        Args:
          busy: The process's activity in place of steps; empty for none.
        """
        self._given += 1
        word = f"{self._given} {busy}"
        if self._can_ask():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._coordinator.publish(_TOPIC, word)
        self._signs[self._coordinator.me] = Sign(word, time.monotonic())

    def look(self) -> None:
        """Reads the signs of the others, and compares them with those of earlier calls."""
        self._since = self._since or time.monotonic()
        if self._can_ask():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for process, word in self._coordinator.collect(_TOPIC).items():
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
        processes = range(self._coordinator.count)
        return [i for i in processes if now - self._signs.get(i, late).seen > seconds]

    def busy(self) -> set[str]:
        """Returns the activities of the processes in place of steps."""
        return {sign.word.partition(" ")[2] for sign in self._signs.values()} - {""}

    def _can_ask(self) -> bool:
        return self._coordinator.count > 1 and self._coordinator.answers
