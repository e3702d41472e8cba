"""DeepSpeed's hostfile, and its ``--include`` and ``--exclude``."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from zerojax.launch.error import UsageError, in_a_line

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,4})")


class Host(NamedTuple):
    """A machine.

    Attributes:
      name: Name in the network.
      slots: Indices of the GPUs to use, one process each.
    """

    name: str
    slots: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """True if the host is this machine."""
        return self.name in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def read_hostfile(path: Path) -> list[Host]:
    """Reads the hosts of a file with lines ``worker-0 slots=8``; # begins a comment.

    Raises:
      UsageError: The file cannot be read, or a line is wrong; names the file and the line.
    """
    try:
        # Without O_NONBLOCK a FIFO that nobody writes to would be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(handle, True)
        with open(handle) as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--hostfile {path}: {in_a_line(error)}; write lines `HOST slots=N`"
        ) from None
    hosts: list[Host] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        if not (match := _LINE.fullmatch(text)) or not int(match[2]):
            raise UsageError(f"{path}:{number}: expected `HOST slots=N`, got {text!r}")
        if match[1] in seen:
            first = seen[match[1]]
            raise UsageError(f"{path}:{number}: {match[1]} is in line {first} too: remove one")
        seen[match[1]] = number
        hosts.append(Host(match[1], tuple(range(int(match[2])))))
    if not hosts:
        raise UsageError(f"{path}: no line names a host: write `HOST slots=N`")
    return hosts


def select(hosts: list[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Returns the selected hosts, in the hostfile's order.

    Args:
      hosts: The hosts of the hostfile.
      include: Hosts and slots to keep: ``worker-0@worker-1:0,2`` keeps all slots of worker-0 and
        two of worker-1.
      exclude: Hosts and slots to leave out, in the same format.

    Raises:
      UsageError: Both are given, a name or slot is unknown, or nothing is left.
    """
    if include and exclude:
        raise UsageError("--include and --exclude are both given: remove one")
    if not (spec := include or exclude):
        return hosts
    option = "--include" if include else "--exclude"
    known = {host.name: host.slots for host in hosts}
    named: dict[str, set[int]] = {}
    for part in spec.split("@"):
        name, colon, text = part.strip().partition(":")
        if name not in known:
            raise UsageError(f"{option}: {name!r} is none of the hosts {', '.join(known)}")
        if colon and not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
            raise UsageError(f"{option}: expected HOST or HOST:0,2, got {part!r}")
        slots = [*map(int, text.split(","))] if colon else known[name]
        if unknown := [slot for slot in slots if slot not in known[name]]:
            last = len(known[name]) - 1
            raise UsageError(f"{option}: {name} has slots 0 to {last}, not {unknown[0]}")
        named.setdefault(name, set()).update(slots)
    selected = []
    for name, slots in known.items():
        chosen = named.get(name, ())
        if kept := tuple(slot for slot in slots if (slot in chosen) == bool(include)):
            selected.append(Host(name, kept))
    if not selected:
        raise UsageError(f"{option} {spec} leaves no host: name others")
    return selected
