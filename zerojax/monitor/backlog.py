"""Queues of steps that the device has not finished, and the one in front of the writers."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax

from zerojax.monitor.tags import NORM, RATE, Scalar
from zerojax.monitor.writers import MetricsWriter
from zerojax.optim.telemetry import is_known
from zerojax.optim.wrap import UNKNOWN

_LONGEST = 256  # steps


class Unread(Protocol):
    """Numbers of a step that the device may not have finished."""

    def ready(self) -> bool:
        """Returns whether the device has finished them."""


_T = TypeVar("_T", bound=Unread)


class StepQueue(Generic[_T]):
    """A queue of steps, each read once the device has finished it, in order.

    Args:
      read: Reads a step.
    """

    def __init__(self, read: Callable[[_T], None]) -> None:
        self._read = read
        self._waiting: deque[_T] = deque()

    def push(self, step: _T) -> None:
        """Adds a step, and reads the finished ones.

        Waits for the device only if 256 steps are already queued, which bounds the memory; with so
        much work queued, the device does not become idle."""
        self._waiting.append(step)
        self.drain()

    def drain(self, *, wait: bool = False) -> None:
        """Reads the finished steps; with ``wait``, all steps."""
        waiting = self._waiting
        while waiting and (wait or len(waiting) > _LONGEST or waiting[0].ready()):
            self._read(waiting.popleft())


class Figures(NamedTuple):
    """The figures of one step.

    Attributes:
      rows: The rows of the global batch.
      step: The state's count of steps after this step: int32 [], maybe not ready.
      scalars: Numbers, and arrays of shape [] (maybe not ready), by tag.
    """

    rows: int
    step: jax.Array
    scalars: Mapping[str, Scalar]

    @property
    def arrays(self) -> list[Any]:
        return [x for x in (self.step, *self.scalars.values()) if hasattr(x, "is_ready")]

    def ready(self) -> bool:
        return all(_deleted(x) or x.is_ready() for x in self.arrays)


class Backlog:
    """A queue that keeps the figures of steps until the device is done, then writes them in order.

    The first error of each writer is logged, and training continues; the writer still gets the next
    figures. Figures that remain are written when the interpreter exits.

    Args:
      open_writers: Opens the writers before the first figures, and again after :meth:`close`.
    """

    def __init__(self, open_writers: Callable[[], list[MetricsWriter]]) -> None:
        self._open = open_writers
        self._writers: list[MetricsWriter] | None = None
        self._queue = StepQueue(self._write_step)
        self._samples = 0
        self._warned: set[str] = set()
        self.before: int | None = None
        """Steps of the state before the first one in this queue; None until that step is ready."""

    def open(self) -> None:
        """Opens the writers now, and raises their errors."""
        if self._writers is None:
            self._writers = self._open()
            # The last registered function runs first at exit; close() needs the writers and jax.
            atexit.register(self.close)

    def push(self, figures: Figures) -> None:
        """Adds a step's figures, and writes those that are ready."""
        self.open()
        if self._writers:
            for x in figures.arrays:
                if hasattr(x, "copy_to_host_async") and not _deleted(x):
                    x.copy_to_host_async()
        if self._writers or self.before is None:
            self._queue.push(figures)

    def drain(self) -> None:
        """Writes the figures of all steps, for which it waits."""
        self._queue.drain(wait=True)

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Writes further figures after those of all steps in the queue, for which it waits."""
        self.open()
        self.drain()
        self._write(figures, samples)

    def flush(self) -> None:
        """Writes everything; the writers stay open."""
        self.drain()
        for writer in self._writers or ():
            with self._warnings(writer):
                writer.flush()

    def close(self) -> None:
        """Writes everything and closes the writers."""
        atexit.unregister(self.close)
        try:
            self.drain()
        finally:
            writers, self._writers = self._writers or [], None
            for writer in writers:
                with self._warnings(writer):
                    writer.close()

    def _write_step(self, figures: Figures) -> None:
        if self.before is None:
            # A state from a checkpoint continues the count of samples.
            self.before = 0 if _deleted(figures.step) else max(0, int(figures.step) - 1)
            self._samples = self.before * figures.rows
        self._samples += figures.rows
        if self._writers:
            self._write(dict(self._known(figures)), self._samples)

    def _known(self, figures: Figures) -> Iterator[tuple[str, float]]:
        for tag, x in figures.scalars.items():
            if _deleted(x):
                self._warn(tag, RuntimeError("its array was deleted or donated before it was read"))
                continue
            value = float(x)
            # A norm that is not a number is news; UNKNOWN is the value of one not computed.
            is_unknown = value == UNKNOWN if tag == NORM else tag == RATE and not is_known(value)
            if not is_unknown:
                yield tag, value

    def _write(self, figures: Mapping[str, float], samples: int) -> None:
        for writer in self._writers or ():
            with self._warnings(writer):
                writer.write(figures, samples)

    @contextlib.contextmanager
    def _warnings(self, writer: MetricsWriter) -> Iterator[None]:
        """Logs a writer's error in place of raising it."""
        try:
            yield
        except Exception as error:
            self._warn(writer.where, error)

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logging.getLogger("zerojax").warning(
                "%s: metrics are missing (%s: %s). Training continues; this warning is not "
                "repeated.",
                what,
                type(error).__name__,
                error,
            )


def _deleted(x: object) -> bool:
    return hasattr(x, "is_deleted") and x.is_deleted()
