"""A check that all processes make the same calls of zerojax, with equal forms and values."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.distributed.coordinator import Coordinator, coordinator
from zerojax.distributed.equality import SAME_ARGUMENTS, are_computed, descriptions
from zerojax.distributed.exchange import gather
from zerojax.distributed.failure import end_with
from zerojax.distributed.launched import LaunchError
from zerojax.distributed.roll_call import unequal
from zerojax.xla import compat

TICK = 2.0
"""Seconds between two comparisons."""

_CALLS, _FORMS, _PROBLEM = "calls", "the form of a call", "different calls"
_PUBLISHED, _KEPT = 64, 4096  # calls
_END = "the end of the program"
_PATIENCE = 600.0  # s for a process that has not come to a call of another form
_SAME_FORM = (
    ": drop the last incomplete batch or fill it with rows of weight 0, pad the rows of all "
    'processes to one length (padding="max_length" of a tokenizer), and use one dtype'
)


class _Call(NamedTuple):
    """A call of zerojax.

    Attributes:
      checksum: Checksum of the names of all calls so far.
      name: The call, in words.
      form: JSON of a description of each array and constant by name; "" if it is not compared.
      number: The number of the call among those of its function.
    """

    checksum: int
    name: str
    form: str
    number: int


@dataclass
class CallsOfFunction:
    """The number of calls of one function so far, and the form of the last as in ``_Call``."""

    number: int = 0
    form: str = ""


class Lockstep:
    """Compares the calls of all processes with those of process 0, every few seconds.

    If one process evaluates, saves or steps by itself, it waits for the others forever, or its
    collectives pair up with those of another call. The check never waits: process 0 publishes
    its last calls, and the others read them. A process that finds a difference ends, as all others
    do, with an error. So it does where the forms or the values of a call differ.

    Calls of other forms run other programs, whose collectives wait for each other forever, or pair
    up and add unequal numbers. A process whose form changes therefore waits for the others before
    it runs the call: either all forms change, or the check finds the difference.

    Args:
      this: The coordinator of this process.
      silent: Seconds after which a process reports that two processes are at different calls, and
        at which lines.
    """

    def __init__(self, this: Coordinator, silent: float = 60.0) -> None:
        self._coordinator, self._me, self._silent = this, this.me, silent
        self._lock = threading.Lock()
        self._count, self._sum = 0, 0
        self._calls: deque[_Call] = deque(maxlen=_KEPT)
        self._agreed = 0  # the last call for whose form this process has waited
        self._unread: deque[tuple[int, Mapping[str, object]]] = deque(maxlen=_KEPT)
        self._values: deque[tuple[int, dict[str, str]]] = deque(maxlen=_KEPT)
        self._published, self._has_ended = "", False
        self._still, self._since = (0, "", 0), math.inf  # positions, and since when
        this.every(self._look)

    def note(self, call: str, form: str = "", number: int = 0) -> None:
        """Records a call, in words, that all processes must execute, before it waits for any."""
        with self._lock:
            self._count, self._sum = self._count + 1, zlib.crc32(call.encode(), self._sum)
            self._calls.append(_Call(self._sum, call, form, number))

    def agree(self, calls: CallsOfFunction, name: str, form: Mapping[str, str]) -> None:
        """Records a call; if its form has changed, compares the form before the call runs.

        Args:
          calls: The earlier calls of the function.
          name: The call, in words.
          form: A description of each array and constant of the call, by name.

        Raises:
          ValueError: Another process passes another form; the message has what differs.
          ProcessesMissing: A process did not come to the call.
        """
        previous, calls.form = calls.form, json.dumps(form)
        calls.number += 1
        self.note(name, calls.form, calls.number)
        if calls.form == previous:
            return
        this, call = self._coordinator, self._calls[-1]
        texts = gather(this, _FORMS, self._count, call.form, _PATIENCE)
        if self._agreed:  # whose texts all have read, as they are here
            this.delete(_FORMS, self._agreed)
        self._agreed = self._count
        with self._lock:  # a process that catches the error may go on
            self._calls[-1] = call._replace(form="")
        if problem := _unequal_forms(call, dict(enumerate(texts))):
            raise ValueError(problem)

    def note_values(self, values: Mapping[str, object]) -> None:
        """Records values of the last call by name, which must be equal in all processes.

        Nobody changes the arrays among them.
        """
        with self._lock:
            self._unread.append((self._count, values))

    def _look(self) -> float:
        """Publishes the calls of process 0, or compares this process's calls with them."""
        if self._coordinator.ended and not self._has_ended:
            self._has_ended = True
            self.note(_END)
        for problem in self._coordinator.collect(_PROBLEM).values():
            end_with(LaunchError(problem))
        self._read()
        if self._me == 0 and (text := self.snapshot()) != self._published:
            self._coordinator.publish(_CALLS, text)
            self._published = text
        for text in self._coordinator.collect(_CALLS).values() if self._me else ():
            self.compare(text)
        return TICK

    def _read(self) -> None:
        """Describes the values of calls, as far as the devices have computed them."""
        while self._unread:
            number, values = self._unread[0]
            try:
                if not are_computed(values.values()):
                    return
                self._values.append((number, descriptions(values)))
            except RuntimeError:  # deleted meanwhile, or the computation failed
                pass
            self._unread.popleft()

    def snapshot(self) -> str:
        """Returns the number of calls, the last of them, the forms that these name by index, the
        main thread's line, and the last values, as JSON."""
        with self._lock:
            calls, values = [*self._calls][-_PUBLISHED:], [*self._values][-_PUBLISHED:]
            count = self._count
        forms = [*dict.fromkeys(call.form for call in calls)]
        calls_by_form = [call._replace(form=str(forms.index(call.form))) for call in calls]
        return json.dumps([count, calls_by_form, forms, _place(), values])

    def compare(self, description: str) -> None:
        """Ends all processes if this process has executed other calls than process 0."""
        count, calls, forms, place, values = json.loads(description)
        other_calls = [_Call(*call) for call in calls]
        with self._lock:
            own_calls, number = [*self._calls], self._count
        first = max(count - len(other_calls), number - len(own_calls))
        for n in range(first, min(count, number)):
            own, other = own_calls[n - number], other_calls[n - count]
            if own.checksum != other.checksum:
                self._refuse(
                    f"the processes call different functions: call {n + 1} of zerojax is "
                    f"{other.name} in process 0, at {place}, and {own.name} in process "
                    f"{self._me}, at {_place()}. Run the same steps, evaluations, saves and "
                    "restores in every process; print and log in process 0 only"
                )
            form = forms[int(other.form)]
            if own.form and form and own.form != form:
                self._refuse(_unequal_forms(own, {0: form, self._me: own.form}))
        own_values = dict(self._values)
        for n, others in values:
            for name, value in own_values.get(n, {}).items():
                if value != others.get(name):
                    self._refuse(
                        f"{name} is {value} in process {self._me} and {others.get(name)} "
                        f"in process 0, at call {n} of zerojax. {SAME_ARGUMENTS}"
                    )
        self._report_waiting(count, place, number)

    def _refuse(self, problem: str) -> NoReturn:
        """Ends this process, and the others by what it publishes."""
        self._coordinator.publish(_PROBLEM, problem)
        end_with(LaunchError(problem))

    def _report_waiting(self, count: int, place: str, number: int) -> None:
        """Prints once where two processes are that have been at different calls for long."""
        positions, now = (count, place, number), time.monotonic()
        if self._still != positions:
            self._still, self._since = positions, now
        elif number > count and self._me > 1:
            return  # process 1 sees it too, and reports it
        elif count != number and now - self._since > self._silent:
            self._since = math.inf
            print(
                f"zerojax: process 0 has been at {place} for {self._silent:g} s, in or "
                f"after call {count} of zerojax, and process {self._me} is at {_place()}, call "
                f"{number}. If one reads an array that all devices hold, let all processes do "
                "so",
                file=sys.stderr,
                flush=True,
            )


def lockstep(mesh: Mesh | AbstractMesh) -> Lockstep | None:
    """Returns this process's only Lockstep, started by the first call; None unless the mesh has
    devices of all processes, and these are several."""
    if jax.process_count() == 1 or isinstance(mesh, AbstractMesh):
        return None
    if len({device.process_index for device in mesh.devices.flat}) < jax.process_count():
        return None
    return coordinator().only(Lockstep)


def _unequal_forms(call: _Call, texts: Mapping[int, str]) -> str:
    """Returns the error for forms that differ between these processes; "" for equal ones."""
    differing = unequal({process: json.loads(text) for process, text in sorted(texts.items())})
    if not differing:
        return ""
    (name, groups), *more = differing.items()
    values = ", ".join(f"{value} in {who}" for value, who in groups.items())
    remedy = _SAME_FORM if name.startswith("batch") else f". {SAME_ARGUMENTS}"
    others = f", and {len(more)} more differ{'s' * (len(more) == 1)}" if more else ""
    return (
        f"{call.name.partition('(')[0]}: the processes pass different arguments at call "
        f"{call.number}: {name} is {values}{others}. All processes run one program{remedy}."
    )


def _place() -> str:
    """Returns the line of the user's program at which the main thread is."""
    library_paths = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__), "<")
    for frame in compat.frames(threading.main_thread().ident):
        file = frame.f_code.co_filename
        if not file.startswith(library_paths) and "site-packages" not in file:
            return f"{file}:{frame.f_lineno}"
    return "its end"
