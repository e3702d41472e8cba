"""Datasets without a length, read in their own order: ``datasets.IterableDataset`` and the like.

A pass over the stream is split into updates of as many rows as the arguments say; the last of a
pass may have fewer, as an epoch's last update, and then the stream begins anew. The run's length is
``max_steps``. Every process reads the stream and keeps its own rows of each update, so that the
stream must yield the same rows in each. A run that is resumed reads and skips the rows of the
updates before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from zerojax.trainer.data import Batch, Epochs, Reader, Update, is_stream

Rows = TypeVar("Rows", list[Any], range)


class StreamReader(Reader):
    """Reads the updates of a stream in order.

    Args:
      dataset: The stream; ``set_epoch``, if it has that method, gets the number of each pass.
      multiple: An update at the end of a pass has a multiple of this number of rows; further rows
        are dropped.
      **options: The other arguments of :class:`Reader`.
    """

    def __init__(self, dataset: Any, *, multiple: int = 1, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._multiple, self._options = multiple, options
        self._updates: Iterator[list[Any]] = iter(())
        self._next = 0

    def at(self, epochs: Epochs, step: int) -> Update:
        """Returns this process's rows of an update; reads and skips the rows of those before."""
        if step < self._next or not self._next:
            self._updates, self._next = self._passes(epochs.batch), 0
        rows = next(itertools.islice(self._updates, step - self._next, None))
        self._next = step + 1
        return self._of(rows).update(np.arange(len(rows)), epochs.batch)

    def sample(self) -> Batch:
        """Returns a batch of the first row, the same in every process."""
        return self._of(self._nonempty([*itertools.islice(self._begun(0), 1)])).sample()

    def all(self, size: int, limit: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Yields batches of at most ``size`` rows in order, each with its number of rows."""
        stream = itertools.islice(self._begun(0), limit)
        while rows := [*itertools.islice(stream, size)]:
            yield len(rows), self._of(rows).batch(np.arange(len(rows)))

    def _passes(self, size: int) -> Iterator[list[Any]]:
        """Yields the rows of each update, pass after pass."""
        for number in itertools.count():
            stream, updates = self._begun(number), 0
            while rows := [*itertools.islice(stream, size)]:
                if rows := rows[: len(rows) - len(rows) % self._multiple]:
                    updates += 1
                    yield rows
            self._nonempty(range(updates))

    def _begun(self, number: int) -> Iterator[Any]:
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(number)
        return iter(self.dataset)

    def _nonempty(self, rows: Rows) -> Rows:
        """Returns rows, of which there must be some.

        Raises:
          ValueError: There are none.
        """
        if not rows:
            least = f"the {self._multiple} of a micro-batch" if self._multiple > 1 else "one"
            raise ValueError(f"the dataset yields fewer rows than {least}: give it more rows")
        return rows

    def _of(self, rows: list[Any]) -> Reader:
        return Reader(rows, **self._options)


def reader_of(dataset: Any, *, multiple: int = 1, **options: Any) -> Reader:
    """Returns the reader of a dataset with a length, or of a stream; see :class:`StreamReader`."""
    if is_stream(dataset):
        return StreamReader(dataset, multiple=multiple, **options)
    return Reader(dataset, **options)
