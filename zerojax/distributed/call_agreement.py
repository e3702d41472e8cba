"""Forms of calls that must be equal in all processes, compared only when a form changes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping

import jax

from zerojax.distributed.coordinator import Coordinator, coordinator
from zerojax.distributed.equality import SAME_ARGUMENTS
from zerojax.distributed.exchange import ProcessesMissing, gather
from zerojax.distributed.failure import end_with
from zerojax.distributed.roll_call import unequal

_READING = 60.0  # s in which the others may read the answers
_GRACE = 5  # looks in which the main thread may raise itself
_ANSWERING = 0.1  # s between looks for the answers of the others
_SAME_FORM = (
    ": drop the last incomplete batch or fill it with rows of weight 0, pad the rows of all "
    'processes to one length (padding="max_length" of a tokenizer), and use one dtype'
)


class CallAgreement:
    """The form of each call of one function: shapes and dtypes of its arrays, and its constants.

    Calls of other forms run other programs, whose collectives wait for each other forever, or pair
    up and add unequal numbers. A process whose form changes begins a round at that call, and waits
    for all answers. If all forms change equally, all processes begin it and go on. A process whose
    form does not change sends nothing; the coordinator's thread sees the round and answers. The
    main thread may then already run a program that never ends without the others, so on a mismatch
    the coordinator's thread ends the process if no further call raises.

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
        self._calls, self._form = 0, "{}"
        self._round = 0  # the last that this process has answered
        self._answering, self._own = 0, ""  # the round that the thread answers, and its answer
        self._problem: ValueError | None = None
        self._is_raised, self._looks_left = False, _GRACE

    def agree(self, form: Mapping[str, str]) -> None:
        """Begins a call.

        Args:
          form: A description of each array and constant of the call, by name.

        Raises:
          ValueError: Another process passes another form; the message has what differs.
          ProcessesMissing: A process did not come to the call.
        """
        text = json.dumps(form)
        with self._lock:
            if text != self._form:  # the next round begins once the thread has compared the last
                self._lock.wait_for(lambda: not self._answering, self._seconds)
            if self._problem is not None:
                self._is_raised = True
                raise self._problem
            self._calls += 1
            if text == self._form:
                return
            previous, self._form = self._form, text
            self._round += 1
            number, answer = self._round, _answer(self._calls, text, previous)
        this = self._coordinator or self._start()
        answers = gather(this, self._topic, number, answer, self._seconds)
        if problem := self._mismatch(this, dict(enumerate(answers)), number):
            raise problem

    def _start(self) -> Coordinator:
        this = self._coordinator = self._given or coordinator()
        self._topic = this.new_topic(f"forms of {self._name}")
        this.every(lambda: self._look(this))
        return this

    def _mismatch(
        self, this: Coordinator, answers: Mapping[int, str], number: int
    ) -> ValueError | None:
        """Returns the error for unequal forms, if they are, from the answers of all processes.

        An answer is the call, its form and the form before.
        """
        split = {process: json.loads(answer) for process, answer in answers.items()}
        first = min(at for at, _, _ in split.values())
        forms = {
            process: json.loads(form if at == first else before)
            for process, (at, form, before) in sorted(split.items())
        }
        differing = unequal(forms)
        if not differing:
            return None
        with contextlib.suppress(ProcessesMissing, jax.errors.JaxRuntimeError):
            # Process 0 must not end before all have read the answers.
            gather(this, f"{self._topic}, read", number, "", _READING)
        (name, groups), *more = differing.items()
        values = ", ".join(f"{value} in {who}" for value, who in groups.items())
        remedy = _SAME_FORM if name.startswith("batch") else f". {SAME_ARGUMENTS}"
        others = f", and {len(more)} more differ{'s' * (len(more) == 1)}" if more else ""
        return ValueError(
            f"{self._name}: the processes pass different arguments at call {first}: {name} is "
            f"{values}{others}. All processes run one program{remedy}."
        )

    def _look(self, this: Coordinator) -> float:
        """Answers a round of others at whose call this process's form did not change."""
        if self._problem is not None:
            self._looks_left -= 1
            if self._looks_left < 0 and not self._is_raised:
                end_with(self._problem)
            return this.tick
        number = self._answering or self._round + 1
        answers = this.collect(self._topic, number)
        with self._lock:
            first = min((json.loads(each)[0] for each in answers.values()), default=0)
            if number > self._round and 0 < first <= self._calls:
                self._round = self._answering = number
                self._own = _answer(first, self._form, self._form)
        if self._answering and this.me not in answers:
            this.publish(self._topic, self._own, number)
        elif self._answering and len(answers) == this.count:
            problem = self._mismatch(this, answers, number)
            with self._lock:
                self._answering, self._problem = 0, problem
                self._lock.notify_all()
        return _ANSWERING if self._answering else this.tick


def _answer(call: int, form: str, before: str) -> str:
    return json.dumps([call, form, before])
