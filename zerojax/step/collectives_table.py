"""The collectives of a step, as rows and as a text table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from zerojax.collectives.decisions import NORM, SCATTER, Decision
from zerojax.plan.table import columns, size


@dataclasses.dataclass(frozen=True)
class CollectivesTable:
    """The collectives of a step, in the order of its program.

    Attributes:
      name: The name of the step.
      rows: One row for each collective.
    """

    name: str
    rows: tuple[Decision, ...]

    @classmethod
    def of(cls, name: str, decisions: Sequence[Decision], paths: Sequence[str]) -> CollectivesTable:
        """Returns the collectives of a step. A gradient has its path among the parameters, which
        ends one of ``paths``, those of the state. The norm of gradients that no device has as a
        shard is computed without a collective."""

        def of_state(array: str) -> str:
            return next((path for path in paths if path.endswith(array)), array)

        has_shards = any(each.kind == SCATTER for each in decisions)
        return cls(
            name,
            tuple(
                dataclasses.replace(each, arrays=tuple(map(of_state, each.arrays)))
                for each in decisions
                if has_shards or each.reason != NORM
            ),
        )

    def bytes_by_kind(self) -> dict[str, int]:
        """Returns the bytes that each device sends in a step, by kind of collective."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.kind] = sums.get(row.kind, 0) + row.bytes_a_step
        return sums

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the rows as text, after a header. Rows that differ only in the array, as in
        unrolled layers, are merged."""
        # Only products in fp8 read an array as it is sent.
        compute = {row.compute for row in self.rows} > {""}
        rows = [(*_cells(row), *[row.compute] * compute) for row in _merged_rows(self.rows)]
        return [(*HEADS, *["compute"] * compute), *rows]

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


def _merged_rows(rows: Iterable[Decision]) -> Iterator[Decision]:
    """Merges rows that differ only in the array into one row, with the sum of their runs."""
    alike: dict[Decision, list[Decision]] = {}
    for row in rows:
        alike.setdefault(dataclasses.replace(row, arrays=()), []).append(row)
    for group in alike.values():
        arrays = dict.fromkeys(path for row in group for path in row.arrays)
        times = sum(row.times for row in group)
        yield dataclasses.replace(group[0], arrays=tuple(arrays), times=times)


def _cells(row: Decision) -> tuple[str, ...]:
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
