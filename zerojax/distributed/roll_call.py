"""The roll call: before JAX joins the processes, each process sends its record to process 0.

JAX aborts a process whose peers are late, in C++ and without their names. In the roll call a plain
socket holds the coordinator's port first, and JAX takes over the port once all processes have come.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from zerojax.distributed.addresses import split, wrong_loopback
from zerojax.distributed.launched import Launched, LaunchError

Record = dict[str, Any]
_Value = TypeVar("_Value")

_GREETING = b"zerojax roll call 1\n"
_LONGEST = 1 << 20
"""The most bytes of a record."""
_PATIENCE = 10.0
"""Seconds after which process 0 prints for which processes it waits."""
_RETURN = 30.0
"""Seconds that process 0 may take to listen again, once it has answered."""
_GRACE = 10.0
"""Seconds that an answer may take."""
_LOOPBACK = 20.0
"""Seconds to look for process 0 of another host on this machine, which two hosts may share."""


def call_roll(me: Launched, mine: Record, bind: str, seconds: float) -> list[Record]:
    """Returns the records of all processes, in their order.

    Args:
      me: This process among the others.
      mine: The record of this process, of JSON values, with "host" and "pid".
      bind: ``address:port`` at which process 0 listens; ``[::]`` means all addresses of its host.
      seconds: Seconds to wait for the other processes.

    Raises:
      LaunchError: Processes are missing, came twice, or have left; raised in every process that
        came.
    """
    mine = {"index": me.index, "count": me.count, **mine}
    if me.index:
        return _answer(me, {**mine, "token": me.token}, seconds)
    with contextlib.closing(_Roll(me, mine, bind)) as roll:
        problem = roll.gather(seconds)
        records = [roll.present.get(n, {}) for n in range(me.count)]
        roll.tell({"problem": problem, "records": records})
    if problem:
        raise LaunchError(problem)
    return records


class _Roll:
    """The processes that have come, as process 0 knows."""

    def __init__(self, me: Launched, mine: Record, bind: str) -> None:
        self.me, self.present = me, {0: mine}
        self._heard: dict[socket.socket, bytearray] = {}
        self._speakers: dict[socket.socket, int] = {}
        self._waiting = selectors.DefaultSelector()
        self._listener = _listen(me, bind)
        self._waiting.register(self._listener, selectors.EVENT_READ)

    def gather(self, seconds: float) -> str:
        """Waits for all processes; returns the problem, or "" for none."""
        start, has_reported = time.monotonic(), False
        while len(self.present) < self.me.count:
            waited = time.monotonic() - start
            if not has_reported and waited >= _PATIENCE:
                has_reported = True
                print(f"zerojax: {self._waits()}", file=sys.stderr, flush=True)
            ready = self._waiting.select(max(0.0, min(seconds - waited, 1.0)))
            # Some may have come while this process was stopped; strangers come forever.
            if waited >= seconds and (not ready or waited >= 2 * seconds):
                return self._missing(seconds)
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._admit()
                elif problem := self._hear(key.data):
                    return problem
        return ""

    def _admit(self) -> None:
        with contextlib.suppress(OSError):  # closed already, or there is no descriptor
            guest, _ = self._listener.accept()
            self._heard[guest] = bytearray()
            guest.setblocking(False)
            self._waiting.register(guest, selectors.EVENT_READ, guest)
            guest.send(_GREETING)

    def _dismiss(self, guest: socket.socket) -> None:
        self._waiting.unregister(guest)
        del self._heard[guest]
        guest.close()

    def _hear(self, guest: socket.socket) -> str:
        buffer, received = self._heard[guest], b""
        with contextlib.suppress(OSError):
            received = guest.recv(1 << 16)
        buffer += received
        if guest in self._speakers and not received:
            who = _named(self.present.pop(self._speakers[guest]))
            return f"{who} left before all processes had arrived: look at its output"
        if received and not buffer.endswith(b"\n") and len(buffer) <= _LONGEST:
            return ""
        record = _parsed(bytes(buffer), {"index", "count", "host", "pid"})
        if record is None or not _fits(record, self.present[0]):  # a scanner, a health check
            self._dismiss(guest)
            return ""
        token = str(record.pop("token", "")).encode(errors="replace")
        if not secrets.compare_digest(token, self.me.token.encode(errors="replace")):
            self._send(guest, {"problem": self._of_another_run(record), "records": []})
            self._dismiss(guest)
            return ""
        if problem := self._odd(record):
            return problem
        self.present[record["index"]], self._speakers[guest] = record, record["index"]
        return ""

    def _odd(self, record: Record) -> str:
        if record["count"] != self.me.count:
            return (
                f"{_named(record)} is one of {record['count']} processes, and "
                f"{_named(self.present[0])} one of {self.me.count}: give all the same number "
                f"({self.me.by})"
            )
        if (other := self.present.get(record["index"])) is not None:
            return (
                f"{_named(other)} and {_named(record)} have one number of {self.me.count}: "
                "number each process, and give each run a port"
            )
        return ""

    def _of_another_run(self, record: Record) -> str:
        return (
            f"{self.me.coordinator} belongs to another run, whose process 0 is "
            f"{_named(self.present[0])}; {_named(record)} has another ZEROJAX_TOKEN, or none: "
            "give each run its own port, and all its processes one token"
        )

    def _missing(self, seconds: float) -> str:
        hosts = by_host(self.present.values())
        present = "; ".join(
            f"{format_indices(numbers)} on {host}" for host, numbers in hosts.items()
        )
        return (
            f"{self._waits()}, which did not arrive within {seconds:g} s. Present: {present}. "
            "Look at the output of the missing ones. If they wait too, they do not reach "
            f"{self.me.coordinator}: check that it is the host of process 0, "
            f"{self.present[0]['host']}, and that no firewall is between"
        )

    def _waits(self) -> str:
        missing = [n for n in range(self.me.count) if n not in self.present]
        return (
            f"process 0 waits at {self.me.coordinator} for {format_indices(missing, 'process')} of "
            f"{self.me.count}"
        )

    def tell(self, reply: Record) -> None:
        """Replies to all processes that came; connections without a record receive problems too."""
        for guest in self._heard if reply["problem"] else self._speakers:
            self._send(guest, reply)
        for guest in self._speakers:  # the side that closes first holds the port for a minute
            with contextlib.suppress(OSError):
                guest.settimeout(1)
                guest.recv(1)

    def _send(self, guest: socket.socket, reply: Record) -> None:
        with contextlib.suppress(OSError):
            guest.settimeout(_GRACE)
            guest.sendall(json.dumps(reply).encode() + b"\n")

    def close(self) -> None:
        for connection in [self._listener, *self._heard]:
            connection.close()
        self._waiting.close()


def _listen(me: Launched, bind: str) -> socket.socket:
    host, port = split(bind)
    is_dual = host == "::" and socket.has_dualstack_ipv6()
    host = "" if host == "::" and not is_dual else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise LaunchError(
            f"process 0 cannot listen on port {port} of {socket.gethostname()}: {why}. End the "
            f"program there (`ss -ltnp`), or choose another port ({me.by} gave {me.coordinator})"
        ) from None
    listener.setblocking(False)
    return listener


def _answer(me: Launched, mine: Record, seconds: float) -> list[Record]:
    """Calls the roll in the other processes, which try until process 0 listens."""
    loopback, reason, was_admitted = wrong_loopback(me), "", False
    deadline = time.monotonic() + (min(seconds, _LOOPBACK) if loopback else seconds)
    while True:
        reply = None
        try:
            with (
                socket.create_connection(split(me.coordinator), _GRACE) as connection,
                connection.makefile("rwb") as stream,
            ):
                reason = "another program listens there"
                if stream.readline(len(_GREETING)) == _GREETING:
                    stream.write(json.dumps(mine).encode() + b"\n")
                    stream.flush()
                    connection.settimeout(seconds + _GRACE)  # process 0 may have come later
                    was_admitted = True
                    reply = _parsed(stream.readline(), {"problem", "records"})
                    deadline = min(deadline, time.monotonic() + _RETURN)
        except OSError as error:
            reason = error.strerror or str(error)
        if reply is not None:
            if reply["problem"]:
                raise LaunchError(reply["problem"])
            return reply["records"]  # type: ignore[no-any-return]
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    if was_admitted:
        raise LaunchError(
            f"process 0 at {me.coordinator} ended before {me.count} processes arrived: see its "
            "output"
        )
    if loopback:
        raise LaunchError(f"process {me.index} of {me.count}: {loopback}")
    raise LaunchError(
        f"process {me.index} of {me.count} on {mine['host']} did not reach process 0 at "
        f"{me.coordinator} within {seconds:g} s: {reason}. Check that process 0 runs there "
        f"({me.by} gave the address), and that no firewall is between"
    )


def by_host(records: Iterable[Record]) -> dict[str, list[int]]:
    """Returns the indices of the processes of each host."""
    hosts: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda record: record["index"]):
        hosts.setdefault(record["host"], []).append(record["index"])
    return hosts


def format_indices(numbers: Iterable[int], noun: str = "") -> str:
    """Formats indices for an error, the first eight, with a noun: "processes 0, 3"."""
    numbers = [*numbers]
    plural = noun and noun + ("es " if len(numbers) > 1 else " ")
    return plural + ", ".join(map(str, numbers[:8])) + ", ..." * bool(numbers[8:])


def by_value(values: Mapping[int, _Value]) -> dict[_Value, str]:
    """Returns the processes of each value, as ``format_indices`` formats them.

    Example:
      >>> by_value({0: "a", 1: "b", 2: "a"})
      {'a': 'processes 0, 2', 'b': 'process 1'}
    """
    groups: dict[_Value, list[int]] = {}
    for process, value in values.items():
        groups.setdefault(value, []).append(process)
    return {value: format_indices(who, "process") for value, who in groups.items()}


def unequal(each: Mapping[int, Mapping[str, _Value]]) -> dict[str, dict[_Value | str, str]]:
    """Returns the names whose values differ, with the processes of each value.

    Args:
      each: The values of each process by name; a missing one is "none".

    Example:
      >>> unequal({0: {"stage": "1", "clip": "2"}, 1: {"stage": "3", "clip": "2"}})
      {'stage': {'1': 'process 0', '3': 'process 1'}}
    """
    names = dict.fromkeys(name for values in each.values() for name in values)
    groups = {
        name: by_value({process: values.get(name, "none") for process, values in each.items()})
        for name in names
    }
    return {name: group for name, group in groups.items() if len(group) > 1}


def _named(record: Record) -> str:
    return f"process {record['index']} (pid {record['pid']} on {record['host']})"


def _fits(record: Record, mine: Record) -> bool:
    """Returns whether a record is from zerojax, in this or another version of zerojax or JAX."""
    index, count = record["index"], record["count"]
    expected = {"index": int, "count": int, "host": str, "pid": int}
    if record.get("versions") == mine.get("versions"):
        expected |= {name: type(x) for name, x in mine.items() if isinstance(x, bool | str | dict)}
    return (
        all(type(record.get(name)) is kind for name, kind in expected.items())
        and isinstance(record.get("versions", {}), dict)
        and 0 <= index < count
    )


def _parsed(line: bytes, keys: set[str]) -> Record | None:
    """Parses a line of JSON, an object with these keys; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and keys <= record.keys():
            return record
    return None
