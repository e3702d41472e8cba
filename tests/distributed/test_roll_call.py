"""The roll call, between threads that stand for processes."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from groups import LIMIT

from zerojax.distributed import roll_call
from zerojax.distributed.launched import Launched, LaunchError
from zerojax.distributed.roll_call import call_roll
from zerojax.launch.job import free_port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which the roll call has slept; no others pass, unless a test adds them."""
    slept = [0.0]
    time = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(roll_call, "time", time)
    return slept


def one(index: int, count: int, port: int, seconds: float = LIMIT, token: str = "") -> Any:
    """What process ``index`` hears: the records, or the error."""
    me = Launched(f"localhost:{port}", count, index, None, None, "torchrun", token)
    mine = {"host": f"n{1 + index // 2}", "pid": 100 + index}
    try:
        return call_roll(me, mine, f"127.0.0.1:{port}", seconds)
    except LaunchError as error:
        return str(error)


def all_of(*processes: tuple[Any, ...]) -> list[Any]:
    with ThreadPoolExecutor(len(processes)) as pool:
        return [*pool.map(lambda each: one(*each), processes)]


def test_everyone_gets_the_records_of_all(port: int) -> None:
    for records in all_of(*((index, 5, port) for index in (3, 4, 1, 2, 0))):
        assert [(r["index"], r["host"], r["pid"]) for r in records] == [
            (0, "n1", 100), (1, "n1", 101), (2, "n2", 102), (3, "n2", 103), (4, "n3", 104)
        ]  # fmt: skip


def test_who_is_missing(port: int, clock: list[float]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(one, 0, 5, port, 1.5)
        with connected(port) as guest, guest.makefile("rwb") as stream:
            assert stream.readline() == b"zerojax roll call 1\n"
            stream.write(b'{"index": 3, "count": 5, "host": "n2", "pid": 7}\n')
            stream.flush()
            clock.append(2.0)
            told = json.loads(stream.readline())["problem"]
        for said in (waits.result(LIMIT), told):
            assert f"waits at localhost:{port} for processes 1, 2, 4 of 5" in said
            assert "did not arrive within 1.5 s. Present: 0 on n1; 3 on n2" in said


def test_process_0_is_missing(port: int, clock: list[float]) -> None:
    said = one(1, 2, port, 0.5)
    assert len(clock) == 4
    assert f"on n1 did not reach process 0 at localhost:{port} within 0.5 s: Connection" in said


def test_process_0_is_sought_at_a_loopback_for_a_while(port: int, clock: list[float]) -> None:
    """As two nodes of Slurm may share a machine; elsewhere it is an error soon."""
    me = Launched(f"localhost:{port}", 2, 1, True, None, "srun")
    with pytest.raises(LaunchError, match=r"process 1 of 2: the coordinator .* is the loopback of"):
        call_roll(me, {"host": "n1", "pid": 101}, "", LIMIT)
    assert sum(clock) == pytest.approx(20.0, abs=0.3)


def test_strangers_do_not_stop_the_clock(port: int) -> None:
    done = threading.Event()

    def visit() -> int:
        """Connections that close, and some that stay, as fast as they can be made."""
        stay = []
        while not done.is_set():
            with contextlib.suppress(OSError):  # before it listens, and once it has ended
                guest = socket.create_connection(("localhost", port))
                stay.append(guest) if len(stay) < 90 else guest.close()
        for guest in stay:
            guest.close()
        return len(stay)

    with ThreadPoolExecutor(1) as pool:
        visitor = pool.submit(visit)
        said = one(0, 2, port, 1.5)
        done.set()
        assert visitor.result(LIMIT) == 90
    assert "for process 1 of 2, which did not arrive within 1.5 s" in said


def test_two_of_the_same_number(port: int) -> None:
    for said in all_of((0, 3, port), (1, 3, port), (1, 3, port)):
        assert "process 1 (pid 101 on n1) and process 1 (pid 101 on n1) have one number" in said


def test_two_counts(port: int) -> None:
    for said in all_of((0, 2, port), (1, 3, port)):
        assert "process 1 (pid 101 on n1) is one of 3 processes, and process 0" in said


def test_a_process_that_dies_while_others_are_awaited(port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(one, 0, 3, port)
        guest = connected(port)
        assert guest.recv(100) == b"zerojax roll call 1\n"
        guest.sendall(b'{"index": 2, "count": 3, "host": "n2", "pid": 7}\n')
        guest.close()
        assert "process 2 (pid 7 on n2) left before all processes had arrived" in said.result(LIMIT)


@pytest.mark.parametrize(
    "record",
    [
        '{"index": "1", "count": 2, "host": "n1", "pid": 1}',
        '{"index": 1, "count": 2, "host": "n1", "pid": {}}',
        "[" * 100_000,
    ],
)
def test_a_stranger_ends_nothing(port: int, record: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(one, 0, 2, port)
        with connected(port) as stranger:
            stranger.sendall(record.encode() + b"\n")
            assert len(one(1, 2, port)) == len(first.result(LIMIT)) == 2


def test_who_has_another_token_is_of_another_run(port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(one, 0, 2, port, LIMIT, "secret")
        for token in ("", "guess", "\ud800é"):
            said = one(1, 2, port, LIMIT, token)
            assert "belongs to another run" in said
            assert "secret" not in said
        records = one(1, 2, port, LIMIT, "secret")
        assert records == first.result(LIMIT)
        assert "secret" not in str(records)


def test_a_port_that_is_taken(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        said = one(0, 2, port)
    assert f"cannot listen on port {port} of" in said
    assert "Address already in use. End the program" in said


def test_another_program_at_the_port(port: int, clock: list[float]) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        said = one(1, 2, port, 0.5)
    assert "another program listens there" in said


def test_process_0_dies(port: int, clock: list[float]) -> None:
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", port)) as server:
        said = pool.submit(one, 1, 3, port)
        guest, _ = server.accept()
        guest.sendall(b"zerojax roll call 1\n")
        assert b'"index": 1' in guest.recv(1000)
        guest.close()
        server.close()
        assert f"process 0 at localhost:{port} ended before 3 processes" in said.result(LIMIT)


def answer(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # once the server is closed
        while True:
            guest, _ = server.accept()
            with guest, contextlib.suppress(OSError):  # the guest may have gone
                guest.sendall(b"220 mail\r\n")


def connected(port: int) -> socket.socket:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port))
        time.sleep(0.05)
    raise TimeoutError
