"""SIGTERM: save, and exit with a status that says so."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

import jax

from zerojax.distributed.turns import AgreedTurn

PREEMPTED = 75
"""Exit status of a run that saved and stopped on SIGTERM: EX_TEMPFAIL of sysexits.h, "try again
later", which no error of Python or of a shell uses."""

_SAME = 5.0
"""Seconds in which a further SIGTERM is the same notice: a cluster may signal each process, and a
launcher besides, which passes the signal on."""


class Preemption:
    """Notes the first SIGTERM, which a cluster sends before it takes a machine.

    A second SIGTERM ends the process at once, unless it comes within 5 s of the first.

    In several processes they agree: wherever a SIGTERM came, ``notice`` becomes true in all of
    them at the same read, so that all save the same step and leave together. For that every process
    reads ``notice`` equally often: once a step, and once a batch of an evaluation that is to be cut
    short. A read that waits for the others' answers takes milliseconds, any other a microsecond.
    After an agreed notice a process survives its own first SIGTERM beyond the end of the block.

    Raises:
      ValueError: outside the main thread, as Python takes signals there alone.

    Example:
      >>> with Preemption() as preemption:
      ...     for step in range(100):
      ...         if step == 3:
      ...             signal.raise_signal(signal.SIGTERM)  # the cluster
      ...         if preemption.notice:  # here: checkpointer.save, .wait, sys.exit(PREEMPTED)
      ...             break
      >>> step
      3
    """

    def __init__(self) -> None:
        self._noted: float | None = None
        self._given = False
        self._turn: AgreedTurn | None = None
        self._before: Any = None

    @property
    def notice(self) -> bool:
        """Whether a SIGTERM came, to any process; the same in all at the same read."""
        if not self._given:
            self._given = self._turn.reached() if self._turn else self._noted is not None
        return self._given

    def __enter__(self) -> Self:
        # In the place of JAX's, which jax.distributed.initialize installs and no second one ends.
        self._before = signal.signal(signal.SIGTERM, self._note)
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            self._turn = AgreedTurn("preemption")
            if self._noted is not None:  # in between
                self._turn.ask()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._noted is not None:
            if now - self._noted > _SAME:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)
            return
        self._noted = now
        if self._turn:
            self._turn.ask()

    def __exit__(self, *_: object) -> None:
        # This process's own signal may come after the notice, while the process leaves.
        if not (self._turn and self._given):
            signal.signal(signal.SIGTERM, self._before)
        if self._turn:
            self._turn.close()
