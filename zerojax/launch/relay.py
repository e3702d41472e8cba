"""The output of several processes on one terminal, in whole lines that say whose they are."""

from __future__ import annotations

import os
import re
import selectors
import threading
from typing import IO

from zerojax.launch.failure import Failure, reported

_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!\n|\Z))")  # a progress bar's lines end with "\r"
# Gloo tells of each connection, and no switch stops that; its threads mix the words of their lines.
_GLOO = re.compile(
    rb"(?=.*(?:\[Gloo\]|peer ranks))(?:\[Gloo\] Rank | is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : |\d+|\s)+"
)
_LONGEST = 1 << 16
_QUIET = 1.0  # seconds; a process may be held up within a line
_TAIL = 1 << 14


class Source:
    """One pipe of a process.

    Attributes:
      prefix: What each line begins with on the terminal.
      to: The descriptor to write to: 1 or 2.
      log: A file that has the same lines without prefix.
      failures: Those that other launchers reported by lines of their own; None: nobody does.
      rest: A line that has not ended.
      tail: The last bytes.
    """

    def __init__(
        self,
        prefix: bytes,
        to: int,
        log: IO[bytes] | None,
        failures: list[Failure] | None = None,
    ) -> None:
        self.prefix, self.to, self.log, self.failures = prefix, to, log, failures
        self.rest, self.tail = b"", b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that ended, and what is too long to wait for its end."""
        self.tail = (self.tail + data)[-_TAIL:]
        self.rest += data
        ended = _LINE.findall(self.rest)
        self.rest = self.rest[sum(map(len, ended)) :]
        if len(self.rest) > _LONGEST:
            ended.append(self.rest)
            self.rest = b""
        return ended


class Relay(threading.Thread):
    """A thread that writes what processes say; a full pipe behind it delays nobody else."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._selector = selectors.DefaultSelector()
        self._last, self._finish = os.pipe()
        self._selector.register(self._last, selectors.EVENT_READ)
        self._open: Source | None = None  # whose line has no end yet
        self._at_start = True
        self._deaf: set[int] = set()

    def pipe(self, source: Source) -> int:
        """A descriptor that a process writes to; before the thread starts."""
        read, write = os.pipe()
        self._selector.register(read, selectors.EVENT_READ, source)
        return write

    def finish(self) -> None:
        """Have the thread end once everything that has been written to the pipes is passed on.

        A pipe that a process of somebody else's holds open is not waited for.
        """
        os.close(self._finish)

    def run(self) -> None:
        finishing = False
        while True:
            sources = [key.data for key in self._selector.get_map().values() if key.data]
            waiting = any(source.rest for source in sources)
            ready = self._selector.select(0 if finishing else _QUIET if waiting else None)
            if not ready:  # a prompt, a progress bar; or there will be no more
                for source in sources:
                    self._flush(source)
                if finishing:
                    break
            for key, _ in ready:
                data = os.read(key.fd, _LONGEST)
                if key.data:
                    for line in key.data.lines(data):
                        self._write(key.data, line)
                if not data:
                    self._close(key.fd)
                    if key.data:
                        self._flush(key.data)
                    else:
                        finishing = True
        self._end_line()
        for key in [*self._selector.get_map().values()]:
            self._close(key.fd)
        self._selector.close()

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _flush(self, source: Source) -> None:
        rest, source.rest = source.rest, b""
        if rest:
            self._write(source, rest)

    def _write(self, source: Source, piece: bytes) -> None:
        if source.failures is not None and (failure := reported(piece)):
            source.failures.append(failure)
            return
        if self._at_start and _GLOO.fullmatch(piece):
            if source.log is not None:
                self._put(source.log.fileno(), piece)
            return
        if self._open is not source:
            self._end_line()
        prefix = source.prefix if self._at_start else b""
        self._put(source.to, prefix + piece)
        if source.log is not None:
            self._put(source.log.fileno(), piece)
        self._at_start = piece.endswith((b"\n", b"\r"))
        self._open = None if piece.endswith(b"\n") else source

    def _end_line(self) -> None:
        if self._open is not None:
            self._put(self._open.to, b"\n")
        self._open, self._at_start = None, True

    def _put(self, to: int, data: bytes) -> None:
        while data and to not in self._deaf:
            try:
                data = data[os.write(to, data) :]
            except OSError as error:  # nobody reads, or a disk is full: the processes go on
                self._deaf.add(to)
                self._put(2, f"zerojax launch: output is lost: {error}\n".encode())
