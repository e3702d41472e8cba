"""A turn that all processes choose together, in loops that run in lockstep."""

from __future__ import annotations

import threading

from zerojax.distributed.coordinator import coordinator

_CHOOSING = 0.02  # s between looks while a turn is chosen


class AgreedTurn:
    """Agreement on a turn: any process asks at any moment, and all learn of it at the same turn.

    A turn is a call of :meth:`reached`, which every process calls equally often. The chosen turn is
    the first that no process has begun when the question reaches it. Until all processes have
    published the number of their turns, :meth:`reached` waits.

    Args:
      name: Name of the question; every process creates agreements of one name in the same order.

    Raises:
      RuntimeError: ``jax.distributed`` is not initialized.
    """

    def __init__(self, name: str) -> None:
        self._coordinator, self._name = coordinator(), name
        self._round = self._coordinator.next_round(name)
        self._turns = 0
        self._chosen: int | None = None
        self._is_asked, self._is_choosing = False, False
        self._choice = threading.Condition()
        self._coordinator.every(self._look)

    def ask(self) -> None:
        """Asks all processes, within a few seconds; signal handlers may call it."""
        self._is_asked = True

    def reached(self) -> bool:
        """Begins a turn; returns whether the turn is the chosen one or later."""
        with self._choice:
            self._choice.wait_for(lambda: not self._is_choosing)
            self._turns += 1
            return self._chosen is not None and self._turns >= self._chosen

    def close(self) -> None:
        """Ends this process's turns, so that the others need not wait for this process.

        They then choose a turn that no process has begun, after the last of this process.
        """
        self._coordinator.forget(self._look)
        with self._choice:
            is_published = self._is_choosing or self._chosen is not None
        if not is_published:  # the others choose by the first number of each process
            self._publish()

    def _publish(self) -> None:
        self._coordinator.publish(self._name, str(self._turns), self._round)

    def _look(self) -> float:
        """Publishes the number of turns once any process has, and chooses once all have."""
        this = self._coordinator
        if self._chosen is not None:
            return this.tick
        turns = this.collect(self._name, self._round)
        if not (turns or self._is_asked):
            return this.tick
        with self._choice:
            self._is_choosing = True
        if this.me not in turns:
            self._publish()
        elif len(turns) == this.count:
            with self._choice:
                self._chosen, self._is_choosing = max(map(int, turns.values())) + 1, False
                self._choice.notify_all()
        return _CHOOSING
