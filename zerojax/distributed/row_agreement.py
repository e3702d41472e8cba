"""Row counts that must be equal in all processes, compared only when a count changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

import jax

from zerojax.distributed.coordinator import Coordinator, coordinator
from zerojax.distributed.exchange import ProcessesMissing, gather
from zerojax.distributed.failure import end_with
from zerojax.distributed.roll_call import by_value

_READING = 60.0  # s in which the others may read the answers
_GRACE = 5  # looks in which the main thread may raise itself
_ANSWERING = 0.1  # s between looks for the answers of the others


class RowAgreement:
    """The row counts that each process passes to one function, call by call.

    With unequal rows the processes would run different programs, and wait for each other for ever.
    A process whose rows change begins a round at that call, and waits for all answers. If all rows
    change equally, all processes begin it and go on. A process whose rows do not change sends
    nothing; the coordinator's thread sees the round and answers. The main thread may then already
    run a program that never ends without the others, so on a mismatch the coordinator's thread ends
    the process if no further call raises.

    Args:
      name: Name of the function, for messages. All processes must make the first calls of
        functions of one name in the same order.
      seconds: Seconds to wait for a process that has not come to the call.
      this: The coordinator of this process, which the first round starts by default.
    """

    def __init__(self, name: str, seconds: float = 600.0, this: Coordinator | None = None) -> None:
        self._name, self._seconds, self._given = name, seconds, this
        self._coordinator: Coordinator | None = None
        self._topic = ""
        self._lock = threading.Condition()
        self._calls, self._rows = 0, ""
        self._round = 0  # the last that this process has answered
        self._answering, self._answer = 0, ""  # the round that the thread answers; 0 for none
        self._problem: ValueError | None = None
        self._is_raised, self._looks_left = False, _GRACE

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
            if rows != self._rows:  # the next round begins once the thread has compared the last
                self._lock.wait_for(lambda: not self._answering, self._seconds)
            if self._problem is not None:
                self._is_raised = True
                raise self._problem
            self._calls += 1
            if rows == self._rows:
                return
            previous, self._rows = self._rows, rows
            self._round += 1
            number, answer = self._round, f"{self._calls}:{rows}:{previous}"
        this = self._coordinator or self._start()
        answers = gather(this, self._topic, number, answer, self._seconds)
        if problem := self._mismatch(this, dict(enumerate(answers)), number):
            raise problem

    def _start(self) -> Coordinator:
        this = self._coordinator = self._given or coordinator()
        self._topic = this.new_topic(f"rows of {self._name}")
        this.every(lambda: self._look(this))
        return this

    def _mismatch(
        self, this: Coordinator, answers: Mapping[int, str], number: int
    ) -> ValueError | None:
        """Returns the error for unequal rows, if they are, from the answers of all processes.

        An answer is the call, its rows and the rows before.
        """
        split = {process: answer.split(":") for process, answer in answers.items()}
        first = min(int(at) for at, _, _ in split.values())
        rows_by_process = {
            process: (rows if int(at) == first else before) or "none"
            for process, (at, rows, before) in sorted(split.items())
        }
        groups = by_value(rows_by_process)
        if len(groups) == 1:
            return None
        with contextlib.suppress(ProcessesMissing, jax.errors.JaxRuntimeError):
            # Process 0 must not end before all have read the answers.
            gather(this, f"{self._topic}, read", number, "", _READING)
        counts = ", ".join(f"{rows} in {who}" for rows, who in groups.items())
        return ValueError(
            f"{self._name}: the processes pass different numbers of rows at call {first}: {counts}."
            " Every process passes equally many, so that all run the same program: let the loader "
            "drop the last incomplete batch, or fill it up with rows of weight 0."
        )

    def _look(self, this: Coordinator) -> float:
        """Answers a round of others at whose call this process's rows did not change."""
        if self._problem is not None:
            self._looks_left -= 1
            if self._looks_left < 0 and not self._is_raised:
                end_with(self._problem)
            return this.tick
        number = self._answering or self._round + 1
        answers = this.collect(self._topic, number)
        with self._lock:
            first = min((int(each.partition(":")[0]) for each in answers.values()), default=0)
            if number > self._round and 0 < first <= self._calls:
                self._round = self._answering = number
                self._answer = f"{first}:{self._rows}:{self._rows}"
        if self._answering and this.me not in answers:
            this.publish(self._topic, self._answer, number)
        elif self._answering and len(answers) == this.count:
            problem = self._mismatch(this, answers, number)
            with self._lock:
                self._answering, self._problem = 0, problem
                self._lock.notify_all()
        return _ANSWERING if self._answering else this.tick
