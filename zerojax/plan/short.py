"""Short tables as the ``repr`` of objects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from zerojax.plan.leaf import Leaf
from zerojax.plan.table import columns, size

MOST_ROWS = 10
"""The most rows of one table; further ones are counted."""

Row = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
      rows: The cells; all rows have equally many.
      right: The columns that are flushed right.
      more: The number of rows that were left out.
    """

    rows: Sequence[Row]
    right: Sequence[int] = ()
    more: int = 0

    def lines(self) -> list[str]:
        """Returns the rows as lines of text."""
        more = [f"... {self.more:,} more rows"] if self.more else []
        return [f"  {line}".rstrip() for line in [*columns(self.rows, self.right), *more]]


@dataclasses.dataclass(frozen=True)
class Summary:
    """A title, tables and closing lines.

    Example:
      >>> print(Summary("a title", (Table([("stage", "3"), ("batch", "16")]),)))
      a title
        stage  3
        batch  16
    """

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        tables = ["\n".join(table.lines()) for table in self.tables if table.rows]
        return "\n".join([self.title, *filter(None, ["\n\n".join(tables)]), *self.notes])


class Summarized:
    """An object whose ``repr`` is its :class:`Summary`."""

    def summary(self) -> Summary:
        """Returns a title and a few rows that describe the object."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.summary())


def first_rows(rows: Sequence[Row]) -> Table:
    """Returns a table with the first rows, at most ``MOST_ROWS``."""
    return Table(rows[:MOST_ROWS], more=max(0, len(rows) - MOST_ROWS))


def leaves_table(leaves: Iterable[Leaf]) -> Table:
    """Returns a table of arrays with one row for equal layers: arrays that differ only in a number
    in their path. If there are more than ``MOST_ROWS``, the table has the largest."""
    groups: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        key = (_pattern(leaf), leaf.shape, str(leaf.dtype), leaf.spec, leaf.reason, leaf.place)
        groups.setdefault(key, []).append(leaf)
    largest = sorted(groups.values(), key=lambda group: -sum(leaf.bytes for leaf in group))
    kept = {id(group) for group in largest[:MOST_ROWS]}
    heads = ("parameter", "arrays", "shape", "dtype", "spec", "bytes/device", "why replicated")
    rows = [heads, *(_row(group) for group in groups.values() if id(group) in kept)]
    return Table(rows, right=(1, 5), more=len(groups) - len(kept))


def _pattern(leaf: Leaf) -> str:
    """Returns the path with each number replaced by "*"."""
    return re.sub(r"\d+", "*", leaf.path)


def _row(group: Sequence[Leaf]) -> Row:
    leaf = group[0]
    return (
        leaf.path if len(group) == 1 else _pattern(leaf),
        f"{len(group):,}",
        "x".join(map(str, leaf.shape)) or "scalar",
        str(leaf.dtype),
        str(leaf.spec).replace("PartitionSpec", "P"),
        size(sum(each.bytes_per_device for each in group)),
        leaf.reason,
    )
