"""Strings that the processes of a job exchange without devices and their collectives."""

from __future__ import annotations

import json
import time
from typing import TypeVar

import jax

from zerojax.distributed.coordinator import ANSWER, Coordinator, coordinator
from zerojax.distributed.roll_call import format_indices

_T = TypeVar("_T")


class ProcessesMissing(TimeoutError):
    """Error for an exchange to which not all processes came.

    Attributes:
      missing: Indices of the processes that did not come.
    """

    def __init__(self, what: str, missing: list[int], seconds: float) -> None:
        self.missing = missing
        who = format_indices(missing, "process")
        super().__init__(f"{what}: {who} did not arrive within {seconds:g} s")


def exchange(name: str, mine: _T, seconds: float = 60.0) -> list[_T]:
    """Returns every process's value, in the order of the processes; waits for all of them.

    The values pass through the coordination service of ``jax.distributed``, whatever the devices
    do. All processes call this function equally often with the same name.

    Args:
      name: Name of this exchange, in words that fit an error ("the hash of the config").
      mine: This process's value of JSON, a few kB at most.
      seconds: Seconds to wait for the other processes.

    Raises:
      ProcessesMissing: Some processes did not come; the message has their indices.

    Example:
      >>> exchange("the name of the host", "n1")  # the only process
      ['n1']
    """
    if jax.process_count() == 1:
        return [mine]
    this = coordinator()
    number = this.next_round(name)
    texts = gather(this, name, number, json.dumps(mine), seconds)
    if number > 1:  # every process that is in this round has read the strings of the last round
        this.delete(name, number - 1)
    return [json.loads(text) for text in texts]


def gather(this: Coordinator, topic: str, number: int, mine: str, seconds: float) -> list[str]:
    """Returns the strings of all processes in a round of a topic; rounds count from 1.

    Raises:
      ProcessesMissing: Some processes did not come; the message has their indices.
    """
    this.publish(topic, mine, number)
    deadline = time.monotonic() + seconds
    for process in range(this.count):
        this.wait(topic, number, process, deadline - time.monotonic())
    came = {this.me: mine}
    if this.wait(topic, number, this.me, ANSWER) is not None:
        came |= this.collect(topic, number)
    if missing := [process for process in range(this.count) if process not in came]:
        raise ProcessesMissing(topic, missing, seconds)
    return [came[process] for process in range(this.count)]
