"""Row counts that must be equal in all processes, compared only when a count changes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence

import jax

from zerojax.distributed.exchange import ProcessesMissing, exchange
from zerojax.distributed.leaving import UntilAllHaveLeft
from zerojax.xla import compat

_GRACE = 5.0  # s in which the main thread may raise itself
_LOOK = 1.0  # s between checks for questions of others


class RowAgreement:
    """The row counts that each process passes to one function, call by call.

    With unequal rows the processes would run different programs, and wait for each other for ever.
    A process whose rows change asks the others for their rows at that call, and waits. If all rows
    change equally, all processes ask and go on. A process whose rows do not change sends nothing;
    its background thread sees the question and replies. The main thread may then already run a
    program that never ends without the others, so on a mismatch the background thread ends the
    process if no further call raises.

    Args:
      name: Name of the function, for messages. All processes must make the first calls of their
        functions in the same order.
      seconds: Seconds to wait for a process that has not come to the call.
    """

    def __init__(self, name: str, seconds: float = 600.0) -> None:
        self._name, self._seconds = name, seconds
        self._lock = threading.Lock()
        self._raised = threading.Event()
        self._calls, self._rows, self._turns = 0, "", 0
        self._problem: ValueError | None = None
        self._place = ""

    def agree(self, rows: str) -> None:
        """Begins a call.

        Args:
          rows: The rows that this process passes, as text.

        Raises:
          ValueError: Another process passes other rows; the message has the rows of all processes.
          ProcessesMissing: A process did not come to the call.
        """
        if jax.process_count() == 1:
            return
        with self._lock:
            if self._problem is not None:
                self._raised.set()
                raise self._problem
            self._calls += 1
            if rows == self._rows:
                return
            previous, self._rows = self._rows, rows
            self._turns += 1
        if not self._place:
            self._start()
        client, question = compat.coordination(), f"{self._place}/asked/{self._turns}"
        client.key_value_set(question, str(self._calls), allow_overwrite=True)
        if problem := self._compare(self._calls, rows, previous):
            raise problem
        client.key_value_delete(question)  # all others have asked as well

    def _start(self) -> None:
        client, me = compat.coordination(), jax.process_index()
        number = len(client.key_value_dir_get(f"zerojax/rows/of/{me}/"))
        client.key_value_set(f"zerojax/rows/of/{me}/{number}", self._name)
        self._place = f"zerojax/rows/{number}"
        _Listener(self._listen).start()

    def _compare(self, call: int, rows: str, before: str) -> ValueError | None:
        """Returns the mismatch, if any, once all have sent the call at which their rows changed."""
        name = f"rows of {self._name} ({self._place})"
        answers = [x.split(":") for x in exchange(name, f"{call}:{rows}:{before}", self._seconds)]
        first = min(int(at) for at, _, _ in answers)
        rows_by_process = [rows if int(at) == first else before for at, rows, before in answers]
        if len({*rows_by_process}) == 1:
            return None
        with contextlib.suppress(ProcessesMissing, jax.errors.JaxRuntimeError):
            exchange(f"{name}, read", "", _GRACE)  # keeps the coordinator alive until all have read
        counts = ", ".join(
            f"{each or 'none'} in process{'es' * bool(processes[1:])} {_listed(processes)}"
            for each in dict.fromkeys(rows_by_process)
            for processes in [[i for i, x in enumerate(rows_by_process) if x == each]]
        )
        return ValueError(
            f"{self._name}: the processes pass different numbers of rows at call {first}: {counts}."
            " Every process passes equally many, so that all run the same program: let the loader "
            "drop the last incomplete batch, or fill it up with rows of weight 0."
        )

    def _listen(self, over: threading.Event) -> None:
        """Sends this process's unchanged rows when another process's rows have changed."""
        client = compat.coordination()
        with contextlib.suppress(ProcessesMissing, jax.errors.JaxRuntimeError):
            while not over.wait(_LOOK):
                questions = dict(client.key_value_dir_get(f"{self._place}/asked/"))
                with self._lock:
                    call = questions.get(f"{self._place}/asked/{self._turns + 1}")
                    if call is None or int(call) > self._calls:
                        continue  # the main thread asks too, or has yet to reach the call
                    self._turns += 1
                    rows = self._rows
                if problem := self._compare(int(call), rows, rows):
                    self._report(problem)
                    return

    def _report(self, problem: ValueError) -> None:
        with self._lock:
            self._problem = problem
        if not self._raised.wait(_GRACE):
            sys.excepthook(ValueError, problem, None)
            sys.stderr.flush()
            os._exit(1)  # the main thread waits for the others in a program that they do not run


class _Listener(UntilAllHaveLeft):
    """Thread that answers also after the script's end, which others may not have reached."""

    def __init__(self, listen: Callable[[threading.Event], None]) -> None:
        super().__init__("zerojax rows")
        self._listen = listen

    def run(self) -> None:
        """Runs the thread."""
        self._listen(self.over)


def _listed(processes: Sequence[int]) -> str:
    return ", ".join(map(str, processes[:8])) + (", ..." if processes[8:] else "")
