"""Metrics as CSV, one file a tag, laid out as DeepSpeed's ``csv_monitor`` has them."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
from collections.abc import Sequence
from typing import Any

from zerojax.monitor.tags import Event


class CsvFiles:
    """One file a tag: ``Train/Samples/lr`` is ``<folder>/Train_Samples_lr.csv``, with the header
    ``step,lr`` and a row ``samples,value`` for each event.

    A file that is there is appended to, and gets no second header (DeepSpeed writes one each time
    it starts). Rows are on their way to the disk when :meth:`write` returns.

    Raises:
      OSError: the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        self.where = f"csv_monitor in {os.path.abspath(folder)}"
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        """Appends the events, each to its file.

        Raises:
          OSError: a file could not be written; it is as it was before, the others have their rows.
        """
        rows: dict[str, list[Event]] = {}
        for event in events:
            rows.setdefault(event[0], []).append(event)
        failed: OSError | None = None
        for tag, mine in rows.items():
            path = os.path.join(self._folder, tag.replace("/", "_").replace(" ", "_") + ".csv")
            try:
                self._append(path, tag.rpartition("/")[2], mine)
            except OSError as error:
                failed = failed or OSError(error.errno, error.strerror, path)
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Nothing is open between writes."""

    def _append(self, path: str, header: str, events: list[Event]) -> None:
        with open(path, "ab", buffering=0) as file:
            start = file.tell()
            rows: list[Any] = [] if start else [("step", header)]
            rows += ((samples, value) for _, value, samples in events)
            data = _encoded(rows)
            # A full disk may take a part: half a row would spoil the next one.
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(start)
                raise


def _encoded(rows: list[Any]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
