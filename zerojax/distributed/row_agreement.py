"""Row counts that must be the same in all processes, compared only when one of them changes."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.distributed.exchange import ProcessesMissing
from zerojax.xla import compat

_GRACE = 5.0  # seconds in which the main thread may raise itself
_POLL = 1.0  # seconds for which a thread waits within jaxlib, which nothing else ends


class RowAgreement:
    """The rows that each process passes to one function, call by call.

    With unequal rows the processes would run different programs, and wait for each other for ever.
    A process whose rows are others than at its last call asks the others for theirs at that call,
    and waits. A process whose rows have not changed sends and reads nothing: a thread answers for
    it. Where the rows differ, that process may have started the program already; if its next call
    does not come, as the program never ends, the thread reports the error and ends the process.

    Args:
      name: Of the function, for messages.
      seconds: How long to wait for a process that has not come to the call.
    """

    def __init__(self, name: str, seconds: float = 600.0) -> None:
        self._name, self._seconds = name, seconds
        self._lock, self._raised, self._ended = (
            threading.Lock(),
            threading.Event(),
            threading.Event(),
        )
        self._calls, self._rows = 0, ""
        self._turn = 0  # of the last question that this process has answered
        self._asked = 0  # the call of a question that is still to be answered
        self._problem: ValueError | None = None
        self._place = ""

    def agree(self, rows: str) -> None:
        """Begins a call.

        Args:
          rows: What this process passes, in words.

        Raises:
          ValueError: Another process passes other rows; the message has the numbers of both.
          ProcessesMissing: A process did not come to the call.
        """
        if jax.process_count() == 1:
            return
        with self._lock:
            if self._problem is not None:
                self._raised.set()
                raise self._problem
            self._calls += 1
            before, self._rows = self._rows, rows
            if rows == before and self._asked != self._calls:
                return
        if not self._place:
            self._start()
        first = 0
        while first != self._calls:  # others may have asked of an earlier call
            with self._lock:
                self._turn = turn = self._turn + 1
            first, problem = self._compare(turn, self._calls, rows, before)
            if problem is not None:
                raise problem

    def _start(self) -> None:
        client, me = compat.coordination(), jax.process_index()
        number = len(client.key_value_dir_get(f"zerojax/rows/of/{me}/"))
        client.key_value_set(f"zerojax/rows/of/{me}/{number}", self._name)
        self._place = f"zerojax/rows/{number}"
        thread = threading.Thread(target=self._answer, name="zerojax rows", daemon=True)
        thread.start()

        def end() -> None:  # a thread that the interpreter ends within jaxlib aborts the process
            self._ended.set()
            thread.join()

        atexit.register(end)

    def _compare(
        self, turn: int, call: int, rows: str, before: str
    ) -> tuple[int, ValueError | None]:
        """The earliest call that is asked of, and what is wrong with the rows there."""
        client, count = compat.coordination(), jax.process_count()
        client.key_value_set(f"{self._place}/asked/{turn}", str(call), allow_overwrite=True)
        said = f"{self._place}/said/{turn}/"
        client.key_value_set(f"{said}{jax.process_index()}", f"{call}:{rows}:{before}")
        until = time.monotonic() + self._seconds
        words, missing = [], []
        for process in range(count):
            word = _get(client, f"{said}{process}", until - time.monotonic())
            words.append(word.split(":") if word else ["0", "", ""])
            missing += [] if word else [process]
        if missing:
            raise ProcessesMissing(f"{self._name}, call {call}", missing, self._seconds)
        first = min(int(at) for at, _, _ in words)
        there = [rows if int(at) == first else before for at, rows, before in words]
        return first, self._unequal(first, there)

    def _unequal(self, call: int, rows: Sequence[str]) -> ValueError | None:
        if len({*rows}) == 1:
            return None
        told = ", ".join(
            f"{each or 'none'} in process{'es'[: 2 * (len(of) > 1)]} {_some(of)}"
            for each in dict.fromkeys(rows)
            for of in [[i for i, x in enumerate(rows) if x == each]]
        )
        return ValueError(
            f"{self._name}: the processes pass different numbers of rows at call {call}: {told}. "
            "Every process passes equally many, so that all run the same program: let the loader "
            "drop the last incomplete batch, or fill it up with rows of weight 0."
        )

    def _answer(self) -> None:
        """Answers for a main thread that has nothing to ask."""
        client, turn = compat.coordination(), 0
        while True:
            turn += 1
            asked = None
            while asked is None:
                if self._ended.wait(0.02):
                    return
                asked = _get(client, f"{self._place}/asked/{turn}", _POLL)
            with self._lock:
                if self._turn >= turn:  # the main thread asks itself
                    continue
                if self._calls < int(asked):
                    self._asked = int(asked)
                    continue
                self._turn, rows = turn, self._rows
            try:
                _, problem = self._compare(turn, int(asked), rows, rows)
            except (ProcessesMissing, jax.errors.JaxRuntimeError):
                continue
            if problem is not None:
                self._report(problem)
                return

    def _report(self, problem: ValueError) -> None:
        with self._lock:
            self._problem = problem
        if not self._raised.wait(_GRACE):
            sys.excepthook(ValueError, problem, None)
            sys.stderr.flush()
            os._exit(1)  # the main thread waits for the others in a program that they do not run


def _get(client: Any, key: str, seconds: float) -> str | None:
    """The value of a key, once it is set; None after so many seconds."""
    try:
        return str(client.blocking_key_value_get(key, max(1, round(1000 * seconds))))
    except jax.errors.JaxRuntimeError:
        return None


def _some(processes: Sequence[int]) -> str:
    return ", ".join(map(str, processes[:8])) + (", ..." if processes[8:] else "")
