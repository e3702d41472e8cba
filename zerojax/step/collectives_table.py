"""The collectives of a step as rows, and as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from zerojax.plan.table import columns, size


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One collective that zerojax decides on.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce" or "all-to-all".
      arrays: The paths of the parameter that is sent, or whose gradient is sent; several for values
        that are computed from several; none for other values.
      shape: Of the array that is sent: gathered, or before it is scattered.
      dtype: Its dtype.
      bytes: Bytes that each device sends in one run, over a ring: (n - 1) / n of the array for n
        devices, twice that for an all-reduce.
      times: Runs in a step, those of the loops around it; each branch of a choice counts.
      exact: False in a loop whose number of iterations is unknown, which counts once.
      where: "entry", "before the loop", "use", "loop", "loop, prefetched", "loop, deferred",
        "after the loop", "produced" or "update".
      reason: The reason for the place.
      line: The line of the program that uses the array, or whose gradient it is, as "model.py:7";
        empty where unknown.
    """

    kind: str
    arrays: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    times: int
    exact: bool
    where: str
    reason: str
    line: str

    @property
    def array(self) -> str:
        """The paths, with commas between."""
        return ", ".join(self.arrays)

    @property
    def bytes_a_step(self) -> int:
        """Bytes that each device sends in a step."""
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class CollectivesTable:
    """The collectives of a step, in the order of its program.

    Attributes:
      name: The name of the step.
      rows: One for each collective.
    """

    name: str
    rows: tuple[CollectiveRow, ...]

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in a step, by kind of collective."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.kind] = sums.get(row.kind, 0) + row.bytes_a_step
        return sums

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text, below their heads; those that differ in the array alone, as in layers
        that are written out, together."""
        return [HEADS, *map(_cells, _together(self.rows))]

    def __str__(self) -> str:
        sums = self.bytes_by_kind()
        listed = ", ".join(f"{kind} {size(n)}" for kind, n in sums.items()) or "nothing"
        first = f"{self.name}: each device sends {size(sum(sums.values()))} a step: {listed}"
        return "\n".join([first, *columns(self.cells(), right=RIGHT)]) if self.rows else first


HEADS = (
    "collective", "array", "shape", "dtype", "bytes a device", "times", "where", "line", "reason"
)  # fmt: skip
RIGHT = (4, 5)
"""The columns that are right-aligned."""


def _together(rows: Iterable[CollectiveRow]) -> Iterator[CollectiveRow]:
    """Rows that differ in the array alone as one, which runs as often as they do together."""
    alike: dict[CollectiveRow, list[CollectiveRow]] = {}
    for row in rows:
        alike.setdefault(dataclasses.replace(row, arrays=()), []).append(row)
    for group in alike.values():
        arrays = dict.fromkeys(path for row in group for path in row.arrays)
        times = sum(row.times for row in group)
        yield dataclasses.replace(group[0], arrays=tuple(arrays), times=times)


def _cells(row: CollectiveRow) -> tuple[str, ...]:
    return (
        row.kind,
        _arrays(row.arrays),
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        size(row.bytes),
        f"{row.times:,}{'' if row.exact else ' or more'}",
        row.where,
        row.line,
        row.reason,
    )


def _arrays(paths: tuple[str, ...]) -> str:
    """The first of several paths, and how many more."""
    more = len(paths) - 1
    return f"{paths[0]} and {more} more" if more > 0 else "".join(paths)
