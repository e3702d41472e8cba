"""A turn that all processes choose together, in loops that run in lockstep."""

from __future__ import annotations

import threading

import jax

from zerojax.distributed.broadcast import Broadcast


class AgreedTurn:
    """One process asks at any moment, and all processes learn so at the same turn.

    A turn is a call of :meth:`reached`, of which every process makes the same number. The chosen
    turn is the first that no process has begun when it hears of the question; until all have told
    where they are, :meth:`reached` waits.

    Args:
      name: Of the question; every process makes its agreements of one name in the same order.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """

    def __init__(self, name: str) -> None:
        self._turns = 0
        self._chosen: int | None = None
        self._choosing = threading.Lock()
        self._question = Broadcast(name, self._choose)

    def ask(self) -> None:
        """Asks all processes; from a signal handler too."""
        self._question.send("")

    def reached(self) -> bool:
        """Begins a turn, and tells whether it is the chosen one or a later one."""
        with self._choosing:
            self._turns += 1
            return self._chosen is not None and self._turns >= self._chosen

    def close(self) -> None:
        """Makes no further turns; the others need not wait for this process."""
        self._tell()
        self._question.close()

    def _tell(self) -> None:
        self._question.set(f"turns/{jax.process_index()}", str(self._turns))

    def _choose(self, _: str) -> None:
        with self._choosing:
            self._tell()
            turns = [self._question.wait(f"turns/{i}") for i in range(jax.process_count())]
            self._chosen = max(map(int, turns)) + 1
