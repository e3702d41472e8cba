"""Preemption by SIGTERM: save, and exit with a status that reports the preemption."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import jax

from zerojax.distributed.turns import AgreedTurn

PREEMPTED = 75
"""Exit status of a run that saved and stopped on SIGTERM: EX_TEMPFAIL of sysexits.h, "try again
later", which no error of Python or of a shell uses."""


class Preemption:
    """A context that records the first SIGTERM, which a cluster sends before it takes a machine.

    A second SIGTERM ends the process at once, unless it comes soon after the first: a cluster may
    signal each process and also the launcher, which passes the signal on.

    Several processes agree: whichever process receives a SIGTERM, ``notice`` becomes true in all of
    them at the same read, so that all save the same step and exit together. Every process must
    therefore read ``notice`` equally often: once per step, and once per batch of an evaluation that
    preemption may interrupt. The notice comes within a few seconds. The read that waits for the
    other processes' answers takes about a second, any other read a microsecond. After an agreed
    notice, a process survives its first SIGTERM even after the end of the block.

    Args:
      same_notice: Seconds within which a further SIGTERM counts as the same notice.

    Raises:
      ValueError: outside the main thread, because Python handles signals only there.

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

    def __init__(self, same_notice: float = 5.0) -> None:
        self._same_notice = same_notice
        self._noted: float | None = None
        self._given = False
        self._turn: AgreedTurn | None = None
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    @property
    def notice(self) -> bool:
        """True if any process received a SIGTERM; equal in all processes at the same read."""
        if not self._given:
            self._given = self._turn.reached() if self._turn else self._noted is not None
        return self._given

    def __enter__(self) -> Self:
        # Replaces JAX's handler, which jax.distributed.initialize installs and which keeps a second
        # SIGTERM from ending the process.
        self._before = signal.signal(signal.SIGTERM, self._note)
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            self._turn = AgreedTurn("preemption")
            if self._noted is not None:  # a SIGTERM came before the turn existed
                self._turn.ask()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._noted is not None:
            if now - self._noted > self._same_notice:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)
            return
        self._noted = now
        if self._turn:
            self._turn.ask()

    def __exit__(self, *_: object) -> None:
        # This process's signal may arrive after the notice, while the process exits.
        if not (self._turn and self._given):
            signal.signal(signal.SIGTERM, self._before)
        if self._turn:
            self._turn.close()
