"""The output of several processes on one terminal, in full lines with the process's prefix."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from typing import IO

from zerojax.launch.failure import Outcome, reported

_LONGEST = 1 << 16
_QUIET = 1000  # milliseconds; a process may pause within a line
_LOOK = 100  # milliseconds
_TAIL = 1 << 14


class Source(threading.Thread):
    """A thread that reads one pipe of a process, and writes its lines: to a log, to the terminal.

    Args:
      terminal: The terminal, of all sources.
      prefix: Prefix of each line on the terminal.
      to: The descriptor to write to: 1 or 2.
      log: File for the same lines without prefix.
      failures: Failures that other launchers reported on this pipe; None: no launcher uses it.

    Attributes:
      rest: A line that has not ended.
      tail: The last bytes.
    """

    def __init__(
        self,
        terminal: Terminal,
        prefix: bytes,
        to: int,
        log: IO[bytes] | None,
        failures: list[Outcome] | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.terminal, self.prefix, self.to, self.log = terminal, prefix, to, log
        self.failures, self.rest, self.tail = failures, b"", b""
        self.pipe: IO[bytes] | None = None

    def run(self) -> None:
        """Reads until the pipe has ended, or, if the terminal is to finish, has no more bytes.

        An unrelated process may hold the pipe open.
        """
        assert self.pipe is not None
        ready, is_open = select.poll(), True
        ready.register(self.pipe, select.POLLIN)
        with self.pipe:
            while is_open:
                if ready.poll(_QUIET):
                    data = os.read(self.pipe.fileno(), _LONGEST)
                    lines, is_open = self.lines(data), bool(data)
                else:  # a prompt or a progress bar, or the end of all output
                    lines, self.rest = [self.rest], b""
                    is_open = not self.terminal.is_finishing
                for line in lines:
                    self._write(line)
        self._write(self.rest)

    def lines(self, data: bytes) -> list[bytes]:
        """Adds data; returns the lines that ended, and a line too long to wait for its end.

        A line ends with a newline or, like a progress bar's, with a carriage return, which a
        newline may follow.
        """
        self.tail = (self.tail + data)[-_TAIL:]
        *ended, last = (self.rest + data).splitlines(keepends=True) or [b""]
        is_whole = last.endswith(b"\n") or len(last) > _LONGEST
        self.rest = b"" if is_whole else last
        return [*ended, last] if is_whole else ended

    def _write(self, chunk: bytes) -> None:
        if self.failures is not None and (failure := reported(chunk)):
            self.failures.append(failure)
        elif chunk:
            self.terminal.write(self, chunk)


class Terminal:
    """The output of the launcher, to which one source at a time writes.

    If the terminal's reader stops, the processes block, as they would if they wrote to it directly.
    """

    def __init__(self) -> None:
        self.is_finishing = False
        self._lock = threading.Lock()
        self._open: Source | None = None  # the source of an unfinished line
        self._at_start = True
        self._deaf: set[int] = set()
        self._until = math.inf

    def hurry(self, seconds: float) -> None:
        """Abandons, after ``seconds``, a terminal whose reader is not ready at once.

        Logs are still written completely.
        """
        self._until = time.monotonic() + seconds

    def write(self, source: Source, chunk: bytes) -> None:
        """Writes a line, or the part of one, of a source."""
        with self._lock:
            if source.log is not None:
                self._put(source.log.fileno(), chunk)
            if self._open is not source:
                self.end_line()
            prefix = source.prefix if self._at_start else b""
            self._say(source.to, prefix + chunk)
            self._at_start = chunk.endswith((b"\n", b"\r"))
            self._open = None if chunk.endswith(b"\n") else source

    def end_line(self) -> None:
        """Ends a line that has no end."""
        if self._open is not None:
            self._say(self._open.to, b"\n")
        self._open, self._at_start = None, True

    def _say(self, to: int, data: bytes) -> None:
        """Writes to the terminal, or to its replacement, as soon as the reader is ready."""
        ready = select.poll()
        ready.register(to, select.POLLOUT)
        while data and to not in self._deaf:
            if ready.poll(_LOOK):
                self._put(to, data[: select.PIPE_BUF])  # a ready pipe takes it without blocking
                data = data[select.PIPE_BUF :]
            elif time.monotonic() >= self._until:
                self._lose(to, "its reader does not read")

    def _put(self, to: int, data: bytes) -> None:
        while data and to not in self._deaf:
            try:
                data = data[os.write(to, data) :]
            except OSError as error:  # no reader, or a full disk: the processes go on
                self._lose(to, str(error))

    def _lose(self, to: int, why: str) -> None:
        self._deaf.add(to)
        self._say(2, f"zerojax launch: output is lost: {why}\n".encode())
