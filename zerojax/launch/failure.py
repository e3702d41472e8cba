"""The end of a job, its first failure, and the launcher's messages."""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

_MARK = b"\x1e"
_LONGEST = 3000  # mpirun forwards output in blocks of 4096 bytes


class Outcome(NamedTuple):
    """The end of a group, or of one machine's part of a group.

    Attributes:
      status: The exit status.
      why: The reason, in words, as the process that failed first and how; "" for status 0.
      again: Whether another attempt may help.
      failed_at: Time of the first failure, in seconds since the epoch; 0.0 for none.
      text: The traceback, each line with the process's prefix; "" if none is known.
    """

    status: int
    why: str
    again: bool = True
    failed_at: float = 0.0
    text: str = ""

    def show(self) -> None:
        """Prints the failure, if there is one, after all output of the processes."""
        if self.failed_at:
            say(f"{self.why}\n{self.text}".rstrip("\n"))

    def report(self) -> None:
        """Reports a failure to a launcher of several machines, which shows the earliest of all."""
        if self.failed_at:
            line = json.dumps(self._replace(text=self.text[-_LONGEST:])._asdict()).encode()
            with contextlib.suppress(OSError):
                os.write(2, b"\n" + _MARK + line + b"\n")


def reported(line: bytes) -> Outcome | None:
    """Parses a line of ``report`` into its failure; None for any other line."""
    if not line.startswith(_MARK):
        return None
    try:
        outcome = Outcome(**json.loads(line[1:]))
    except (ValueError, TypeError, RecursionError):  # interrupted by the output of another machine
        return None
    kinds = [type(value) for value in outcome]
    return outcome if kinds == [int, str, bool, float, str] else None


def say(text: str) -> None:
    """Prints a message of the launcher on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"zerojax launch: {text}\n".encode(errors="replace"))
