"""Output in lines, whatever it is: each byte is passed on once."""

import contextlib
import fcntl
import io
import os
from pathlib import Path

from groups import LIMIT
from hypothesis import given
from hypothesis import strategies as st

from zerojax.launch.failure import Outcome, reported
from zerojax.launch.relay import Source, Terminal


def split(*pieces: bytes) -> tuple[list[bytes], bytes]:
    """The lines of an output that comes in these pieces, and what has no end."""
    source = Source(Terminal(), b"", 1, None)
    lines = [line for piece in pieces for line in source.lines(piece)]
    return lines, source.rest


def test_newlines_and_carriage_returns_end_lines() -> None:
    assert split(b"a\nb\r\nc\rd") == ([b"a\n", b"b\r\n", b"c\r"], b"d")
    assert split(b"a\r", b"\nb") == ([b"a\r\n"], b"b")
    assert split(b"a\r", b"b") == ([b"a\r"], b"b")
    assert split(b"a\r") == ([], b"a\r")


@given(st.lists(st.text("a\r\n", max_size=5).map(str.encode), max_size=8))
def test_the_lines_do_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    lines, rest = split(*pieces)
    assert (lines, rest) == split(b"".join(pieces))
    assert b"".join([*lines, rest]) == b"".join(pieces)
    assert all(line.endswith((b"\n", b"\r")) for line in lines)


@given(st.binary(max_size=40))
def test_a_failure_that_is_reported_has_its_types(noise: bytes) -> None:
    assert reported(b"\x1e" + noise) is None
    assert reported(b"\x1e" + b"[" * 100_000) is None
    failed = b'{"status": 1, "why": "why", "again": true, "failed_at": %s, "text": "text"}'
    assert reported(b"\x1e" + failed % b'"x"') is None
    assert reported(b"\x1e" + failed % b"1.5" + b"\n") == Outcome(1, "why", True, 1.5, "text")


def finishing(source: Source, lines: int) -> bytes:
    """What a process has written into a pipe before it ended; an unrelated one holds it open."""
    read, write = os.pipe()
    source.pipe = io.FileIO(read)
    source.start()
    said = b"".join(b"%d\n" % i for i in range(lines))
    os.write(write, said)
    source.terminal.is_finishing = True
    return said


def test_no_line_is_lost_to_a_slow_reader() -> None:
    """The terminal is a pipe of 4096 bytes that is read once the thread waits for it."""
    read, terminal = os.pipe()
    fcntl.fcntl(terminal, fcntl.F_SETPIPE_SZ, 4096)
    relay = Source(Terminal(), b"[0] ", terminal, None)
    finishing(relay, 3000)
    relay.join(0.2)
    assert relay.is_alive()
    got = b""
    while got.count(b"\n") < 3000:
        got += os.read(read, 1 << 16)
    relay.join(LIMIT)
    assert got == b"".join(b"[0] %d\n" % i for i in range(3000))
    os.close(read)
    os.close(terminal)


def test_logs_are_complete_where_nobody_reads_the_terminal(tmp_path: Path) -> None:
    """The terminal is a pipe that is full."""
    read, terminal = os.pipe()
    os.set_blocking(terminal, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(terminal, b"x" * 4096)
    os.set_blocking(terminal, True)
    with (tmp_path / "log").open("wb", buffering=0) as log:
        relay = Source(Terminal(), b"[0] ", terminal, log)
        said = finishing(relay, 1000)
        relay.terminal.hurry(0.0)
        relay.join(LIMIT)
    assert not relay.is_alive()
    assert (tmp_path / "log").read_bytes() == said
    os.close(read)
    os.close(terminal)
