"""Metrics as a TensorBoard event file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from zerojax.monitor.tags import Event

_FLUSH_SECONDS = 1.0


class TensorBoardFile:
    """An event file in ``folder``; one more where there are some already.

    Written by the package tensorboard itself, as those who write its files have it to read them.
    tensorboardX is lighter, but its queue blocks for good once its thread has met a full disk.

    Raises:
      OSError: the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        from tensorboard.summary import Writer

        self.where = f"tensorboard in {os.path.abspath(folder)}"
        self._file = Writer(folder)
        self._flushed = time.monotonic()

    def write(self, events: Sequence[Event]) -> None:
        for tag, value, samples in events:
            self._file.add_scalar(tag, value, samples)
        # A flush waits for tensorboard's thread: about a millisecond, too much for short steps.
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()
