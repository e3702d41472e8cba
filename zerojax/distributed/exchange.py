"""Strings that the processes of a job exchange without devices and their collectives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import jax

from zerojax.xla import compat


class ProcessesMissing(TimeoutError):
    """Error for an exchange to which not all processes came.

    Attributes:
      missing: Indices of the processes that did not come.
    """

    def __init__(self, what: str, missing: list[int], seconds: float) -> None:
        self.missing = missing
        super().__init__(f"{what}: {format_processes(missing)} did not come within {seconds:g} s")


def format_processes(processes: Iterable[int]) -> str:
    """Formats the indices of processes, eight at most.

    Example:
      >>> format_processes([3, 1])
      'processes 1, 3'
    """
    numbers = sorted(processes)
    noun = "process " if len(numbers) == 1 else "processes "
    return noun + ", ".join(map(str, numbers[:8])) + (", ..." if numbers[8:] else "")


def exchange(name: str, mine: str, seconds: float = 60.0) -> list[str]:
    """Returns every process's string, in the order of the processes; waits for all of them.

    The strings pass through the coordinator of ``jax.distributed``, whatever the devices do. All
    processes call this function equally often with the same name.

    Args:
      name: Name of this exchange, in words that fit an error ("the hash of the config").
      mine: This process's string, a few kB at most.
      seconds: Seconds to wait for the other processes.

    Raises:
      ProcessesMissing: Some processes did not come; the message has their indices.

    Example:
      >>> exchange("the name of the host", "n1")  # the only process
      ['n1']
    """
    if jax.process_count() == 1:
        return [mine]
    client, me = compat.coordination(), jax.process_index()
    own_entries = client.key_value_dir_get(_key(name, me))
    turn = 1 + max((int(key.rpartition("/")[2]) for key, _ in own_entries), default=0)
    client.key_value_set(f"{_key(name, me)}{turn}", mine)
    deadline = time.monotonic() + seconds
    received: dict[int, str] = {}
    for process in range(jax.process_count()):
        remaining, key = round(1000 * (deadline - time.monotonic())), f"{_key(name, process)}{turn}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if remaining > 0:
                received[process] = client.blocking_key_value_get(key, remaining)
            else:  # past the deadline, still take a string that is there
                received[process] = client.key_value_try_get(key)
    if missing := [n for n in range(jax.process_count()) if n not in received]:
        raise ProcessesMissing(name, missing, seconds)
    if turn > 1:  # every process that is in this turn has read the strings of the last turn
        client.key_value_delete(f"{_key(name, me)}{turn - 1}")
    return [*received.values()]


def _key(name: str, process: int) -> str:
    return f"zerojax/{name}/{process}/"
