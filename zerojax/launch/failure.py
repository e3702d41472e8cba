"""The first failure of a job, and the launcher's messages."""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

NEVER_JOINED = "script never calls zerojax.init_distributed()"

_MARK = b"\x1e"
_LONGEST = 3000  # mpirun forwards output in blocks of 4096 bytes


class Failure(NamedTuple):
    """The first failure of a group, or of one machine's part of a group.

    Attributes:
      at: Time, in seconds since the epoch.
      status: The exit status that follows.
      why: The process, and the manner of its end.
      text: The traceback, each line with the process's prefix; "" if none is known.
      again: Whether another attempt may help.
    """

    at: float
    status: int
    why: str
    text: str
    again: bool = True

    def show(self) -> None:
        """Prints the failure, after all output of the processes."""
        say(f"{self.why}\n{self.text}".rstrip("\n"))

    def report(self) -> None:
        """Reports to a launcher of several machines, which shows the earliest failure of all."""
        line = json.dumps(self._replace(text=self.text[-_LONGEST:])._asdict()).encode()
        with contextlib.suppress(OSError):
            os.write(2, b"\n" + _MARK + line + b"\n")


def reported(line: bytes) -> Failure | None:
    """Parses a line of ``report`` into its failure; None for any other line."""
    if not line.startswith(_MARK):
        return None
    try:
        failure = Failure(**json.loads(line[1:]))
    except (ValueError, TypeError, RecursionError):  # interrupted by the output of another machine
        return None
    types = {"at": float, "status": int, "why": str, "text": str, "again": bool}
    is_valid = all(type(getattr(failure, name)) is kind for name, kind in types.items())
    return failure if is_valid else None


def say(text: str) -> None:
    """Prints a message of the launcher on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"zerojax launch: {text}\n".encode(errors="replace"))
