"""SIGTERM: save, and exit with a status that says so."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

PREEMPTED = 75
"""Exit status of a run that saved and stopped on SIGTERM: EX_TEMPFAIL of sysexits.h, "try again
later", which no error of Python or of a shell uses."""


class Preemption:
    """Notes the first SIGTERM, which a cluster sends before it takes a machine.

    A second SIGTERM ends the process at once. Each process has its own notice: to stop several at
    the same step, let one decide for all (``jax.experimental.multihost_utils``).

    Attributes:
      notice: Whether a SIGTERM came.

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
        self.notice = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.notice = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
