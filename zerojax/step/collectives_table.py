"""The collectives of a step, as rows and as a text table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from zerojax.plan.table import columns, size


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One collective that zerojax requests.

    Attributes:
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
      arrays: The paths of the parameters that are sent, or whose gradients are sent; several for
        values that are computed from several parameters; none for other values.
      shape: Shape of the array that is sent: after a gather, or before a scatter.
      dtype: Dtype of that array.
      bytes: Bytes that each device sends in one run, over a ring: (n - 1) / n of the array for n
        devices, twice that for an all-reduce.
      times: Runs in a step, including the iterations of the loops around the collective; each
        branch of a conditional counts.
      exact: False in a loop with an unknown number of iterations; such a loop counts once.
      where: "entry", "before the loop", "use", "loop", "loop, prefetched", "loop, deferred",
        "after the loop", "produced", "update" or "between stages".
      reason: The reason for the place.
      line: The line of the program that uses the array, or that its gradient comes from, as
        "model.py:7"; empty if unknown.
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
        """The paths, joined by commas."""
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
      rows: One row for each collective.
    """

    name: str
    rows: tuple[CollectiveRow, ...]

    def bytes_by_kind(self) -> dict[str, int]:
        """Returns the bytes that each device sends in a step, by kind of collective."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.kind] = sums.get(row.kind, 0) + row.bytes_a_step
        return sums

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the rows as text, after a header. Rows that differ only in the array, as in
        unrolled layers, are merged."""
        return [HEADS, *map(_cells, _merged_rows(self.rows))]

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


def _merged_rows(rows: Iterable[CollectiveRow]) -> Iterator[CollectiveRow]:
    """Merges rows that differ only in the array into one row, with the sum of their runs."""
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
    """Returns the first of several paths, and the number of the others."""
    more = len(paths) - 1
    return f"{paths[0]} and {more} more" if more > 0 else "".join(paths)
