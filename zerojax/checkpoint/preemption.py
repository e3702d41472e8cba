"""SIGTERM: save, and exit with a status that says so."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

PREEMPTED = 75
"""Exit status of a run that saved and stopped because it was told to: EX_TEMPFAIL of sysexits.h,
"try again later", which no error of Python or of a shell uses."""


class Preemption:
    """Notes the first SIGTERM, which a cluster sends before it takes a machine; a second one ends
    the process at once, as ever.

    ``notice`` is true from the first signal on. In several processes each has its own: to stop at
    the same step let one decide for all (``jax.experimental.multihost_utils``).

    Raises:
      ValueError: not in the main thread, where alone Python takes signals.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
