"""One writer a folder: a lock that the operating system lets go with its process."""

from __future__ import annotations

import fcntl
import os
import pathlib
import socket
import weakref

from zerojax.checkpoint.errors import CheckpointError

FILE = ".writer"


class Lock:
    """The right to write to a folder, until :meth:`release`, or until this object or its process
    is no more."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._held: weakref.finalize | None = None

    def take(self) -> bool:
        """Whether it is held now; False where another object of this process has it.

        Raises:
          CheckpointError: another process has it.
        """
        if self._held:
            return True
        file = os.open(self._directory / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            if who == _me():
                return False
            raise CheckpointError(
                f"another run writes to {self._directory} ({who or 'unknown process'}): give this "
                "one a folder of its own, or stop the other; to read only, "
                "Checkpointer(..., read_only=True)"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, _me().encode(), 0)
        self._held = weakref.finalize(self, os.close, file)
        return True

    def release(self) -> None:
        if self._held:
            self._held()
            self._held = None


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
