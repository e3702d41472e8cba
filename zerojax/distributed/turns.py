"""A turn that all processes choose together, in loops that run in lockstep."""

from __future__ import annotations

import threading

import jax

from zerojax.distributed.broadcast import Broadcast


class AgreedTurn:
    """Agreement on a turn: any process asks at any moment, and all learn of it at the same turn.

    A turn is a call of :meth:`reached`, which every process calls equally often. The chosen turn is
    the first that no process has begun when the question reaches it. Until all processes have sent
    the number of their turns, :meth:`reached` waits.

    Args:
      name: Name of the question; every process creates agreements of one name in the same order.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """

    def __init__(self, name: str) -> None:
        self._turns = 0
        self._chosen: int | None = None
        self._choosing = threading.Lock()
        self._question = Broadcast(name, self._choose)

    def ask(self) -> None:
        """Asks all processes; signal handlers may call it."""
        self._question.send("")

    def reached(self) -> bool:
        """Begins a turn; returns whether the turn is the chosen one or later."""
        with self._choosing:
            self._turns += 1
            return self._chosen is not None and self._turns >= self._chosen

    def close(self) -> None:
        """Ends this process's turns, so that the others need not wait for this process."""
        self._tell()
        self._question.close()

    def _tell(self) -> None:
        self._question.set(f"turns/{jax.process_index()}", str(self._turns))

    def _choose(self, _: str) -> None:
        with self._choosing:
            self._tell()
            turns = [self._question.wait(f"turns/{i}") for i in range(jax.process_count())]
            self._chosen = max(map(int, turns)) + 1
