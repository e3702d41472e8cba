"""Joint access of processes to a checkpoint: if one process fails, all raise the same error."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import jax
from etils import epath

from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError, reason
from zerojax.distributed.exchange import ProcessesMissing, exchange
from zerojax.distributed.roll_call import by_value

PATIENCE = 300.0
"""Seconds for which processes wait for one another in a collective call."""

LONGEST = 1200.0
"""Seconds for which a process waits for others that still write or read; the limit of orbax."""

_T = TypeVar("_T")

_MAX_ERROR_CHARS = 2000
"""Maximum number of characters of an error that is sent to the other processes."""


def call_on_all(name: str, act: Callable[[], _T], seconds: float = PATIENCE) -> _T:
    """Returns the result of ``act`` in this process, once every process has a result.

    Args:
      name: The name of a sequence of calls that all processes issue in the same order.
      act: The function to call; it must not depend on the other processes.
      seconds: How long to wait for the other processes after ``act``, if there are any.

    Raises:
      CheckpointError: ``act`` failed in another process, which the message names with the cause;
        or another process did not arrive in time.
      Exception: ``act`` failed in this process.

    Example:
      >>> call_on_all("an example", lambda: 3)  # the only process
      3
    """
    return call_and_gather(name, act, lambda _: "", seconds)[0]


def gather_strings(name: str, act: Callable[[], str], seconds: float = PATIENCE) -> list[str]:
    """Returns the results of ``act`` in all processes, in process order; see :func:`call_on_all`.

    Example:
      >>> gather_strings("an example", lambda: "n1")
      ['n1']
    """
    return call_and_gather(name, act, str, seconds)[1]


def call_on_first(name: str, act: Callable[[], str | None], seconds: float = PATIENCE) -> str:
    """Returns the result of ``act``, which only process 0 calls; see :func:`call_on_all`."""
    return gather_strings(name, lambda: (act() or "") if jax.process_index() == 0 else "", seconds)[
        0
    ]


def call_and_gather(
    name: str, act: Callable[[], _T], word: Callable[[_T], str], seconds: float = PATIENCE
) -> tuple[_T, list[str]]:
    """Returns ``act()``, and ``word`` of the result in all processes; see :func:`call_on_all`.

    Example:
      >>> call_and_gather("an example", lambda: 3, str)
      (3, ['3'])
    """
    if jax.process_count() == 1:
        result = act()
        return result, [word(result)]
    own_error: Exception | None = None
    try:
        result = act()
        message = {"word": word(result)}
    except Exception as error:
        own_error = error
        key = "damaged" if isinstance(error, DamagedCheckpointError) else "error"
        message = {key: reason(error)[:_MAX_ERROR_CHARS] or type(error).__name__}
    try:
        messages = [json.loads(text) for text in exchange(name, json.dumps(message), seconds)]
    except ProcessesMissing as missing:
        raise own_error or CheckpointError(
            f"{missing}. Make a Checkpointer, save and restore in all processes together"
        ) from None
    failed = {i: x.get("damaged") or x["error"] for i, x in enumerate(messages) if "word" not in x}
    if not failed:
        return result, [x["word"] for x in messages]
    if own_error and len(failed) == len(messages) and len({*failed.values()}) == 1:
        raise own_error
    kind = DamagedCheckpointError if any("damaged" in x for x in messages) else CheckpointError
    lines = [f"{processes}: {cause}" for cause, processes in by_value(failed).items()]
    raise kind("\n".join(lines)) from own_error


def share_a_folder(directory: epath.Path, claim: Callable[[], None], seconds: float = 30.0) -> str:
    """Checks that the processes share a folder; returns a name for the exchanges among them.

    Process 0 writes a file to the folder. Every other process answers with a file once it sees
    process 0's file, and process 0 looks for the answers.

    Args:
      directory: The folder, which only process 0 creates.
      claim: Creates the folder and takes its lock, in process 0.
      seconds: How long a file may take to become visible.

    Raises:
      CheckpointError: ``claim`` failed, or a file that process 0 wrote is not visible to another
        process, or the reverse; the message names the processes.
    """
    if jax.process_count() == 1:
        claim()
        return ""
    exchange_name, process_index = "a Checkpointer is created", jax.process_index()

    def begin() -> str:
        claim()
        token = secrets.token_hex(4)
        (directory / f".{token}.0").write_text(token)
        return token

    def answer() -> None:
        _look_for(directory / f".{token}.0", f"what process 0 wrote to {directory}", seconds)
        try:
            (directory / f".{token}.{process_index}").write_text(token)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written: {error}") from None

    def await_answers() -> None:
        for process in range(1, jax.process_count()):
            description = f"what process {process} wrote to {directory}"
            _look_for(directory / f".{token}.{process}", description, seconds)

    token = call_on_first(exchange_name, begin)
    try:
        call_on_all(exchange_name, answer, PATIENCE + seconds)
        call_on_first(exchange_name, await_answers, PATIENCE + seconds)
    finally:
        if process_index == 0:
            for file in directory.glob(f".{token}.*"):
                file.unlink(missing_ok=True)
    return f"checkpoint {token}"


def _look_for(file: epath.Path, what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{what} is not visible on {socket.gethostname()} after {seconds:g} s: put the "
                "folder on a file system that all hosts share (NFS, Lustre, a mounted bucket)"
            )
        next(iter(file.parent.glob("*")), None)  # NFS refreshes its listing
        time.sleep(0.05)
