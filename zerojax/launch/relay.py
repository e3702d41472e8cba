"""The output of several processes on one terminal, in full lines with the process's prefix."""

from __future__ import annotations

import io
import math
import os
import select
import selectors
import threading
import time
from dataclasses import dataclass
from typing import IO

from zerojax.launch.failure import Outcome, reported

_LONGEST = 1 << 16
_QUIET = 1.0  # seconds; a process may pause within a line
_LOOK = 100  # milliseconds
_TAIL = 1 << 14


@dataclass(eq=False)
class Source:
    """One pipe of a process.

    Attributes:
      prefix: Prefix of each line on the terminal.
      to: The descriptor to write to: 1 or 2.
      log: File for the same lines without prefix.
      failures: Failures that other launchers reported on this pipe; None: no launcher uses it.
      rest: A line that has not ended.
      tail: The last bytes.
    """

    prefix: bytes
    to: int
    log: IO[bytes] | None
    failures: list[Outcome] | None = None
    rest: bytes = b""
    tail: bytes = b""

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


class Relay(threading.Thread):
    """A thread that writes the output of processes: to their logs first, then to the terminal.

    If the terminal's reader stops, the processes block, as they would if they wrote to it directly.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._selector = selectors.DefaultSelector()
        last, self._finish = os.pipe()
        self.read(io.FileIO(last), None)
        self._open: Source | None = None  # the source of an unfinished line
        self._at_start = True
        self._deaf: set[int] = set()
        self._until = math.inf

    def read(self, pipe: IO[bytes] | None, source: Source | None) -> None:
        """Adds a pipe to read from; call it before the thread starts."""
        assert pipe is not None
        self._selector.register(pipe, selectors.EVENT_READ, source)

    def finish(self) -> None:
        """Ends the thread once it has forwarded all bytes that were written to the pipes.

        The thread does not wait for the end of a pipe that an unrelated process holds open.
        """
        os.close(self._finish)

    def hurry(self, seconds: float) -> None:
        """Abandons, after ``seconds``, a terminal whose reader is not ready at once.

        Logs are still written completely.
        """
        self._until = time.monotonic() + seconds

    def run(self) -> None:
        finishing = False
        while True:
            sources = [key.data for key in self._selector.get_map().values() if key.data]
            waiting = any(source.rest for source in sources)
            ready = self._selector.select(0 if finishing else _QUIET if waiting else None)
            if not ready:  # a prompt or a progress bar, or the end of all output
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
                    self._close(key)
                    if key.data:
                        self._flush(key.data)
                    else:
                        finishing = True
        self._end_line()
        self.close()

    def close(self) -> None:
        """Closes the pipes; callers call it only if the thread has not started."""
        for key in [*self._selector.get_map().values()]:
            self._close(key)
        self._selector.close()

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        assert isinstance(key.fileobj, io.IOBase)
        key.fileobj.close()

    def _flush(self, source: Source) -> None:
        if source.rest:
            self._write(source, source.rest)
            source.rest = b""

    def _write(self, source: Source, chunk: bytes) -> None:
        if source.failures is not None and (failure := reported(chunk)):
            source.failures.append(failure)
            return
        if source.log is not None:
            self._put(source.log.fileno(), chunk)
        if self._open is not source:
            self._end_line()
        prefix = source.prefix if self._at_start else b""
        self._say(source.to, prefix + chunk)
        self._at_start = chunk.endswith((b"\n", b"\r"))
        self._open = None if chunk.endswith(b"\n") else source

    def _end_line(self) -> None:
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
