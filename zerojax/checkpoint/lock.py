"""One writer a folder: a lock that the operating system lets go with its process."""

from __future__ import annotations

import fcntl
import os
import pathlib
import socket

from zerojax.checkpoint.errors import CheckpointError

FILE = ".writer"


class Lock:
    """The right to write to a folder, held until :meth:`release` or the end of the process.

    Attributes:
      held: False where another object of this same process has it, which may go on reading.

    Raises:
      CheckpointError: another process has it.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._file = os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(self._file, 1000, 0).decode(errors="replace")
            os.close(self._file)
            self.held = False
            if who != _me():
                raise CheckpointError(
                    f"another run writes to {directory} ({who or 'unknown process'}): give this "
                    "one a folder of its own, or stop the other; to read only, "
                    "Checkpointer(..., read_only=True)"
                ) from None
            return
        self.held = True
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _me().encode(), 0)

    def release(self) -> None:
        if self.held:
            self.held = False
            os.close(self._file)


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
