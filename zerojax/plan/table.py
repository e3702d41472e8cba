"""Tables as text: the plan in full, and the short tables that objects have as their ``repr``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from zerojax.plan.leaf import Leaf

GROUPS = {
    "params": "parameters",
    "grads": "gradients",
    "compute": "compute copies",
    "secondary": "secondary shards",
    "live": "stay gathered",
    "opt_state": "optimizer state",
    "rest": "other state",
}

PLACES = {
    "device": "on each device",
    "host": "in host memory, for each device",
    "disk": "on disk, for each device",
}
HEADS = ("parameter", "shape", "dtype", "spec", "bytes/device", "why replicated")

MOST_ROWS = 10
"""The most rows of a short table; further ones are counted."""

Row = tuple[str, ...]


def size(n: float) -> str:
    """Formats bytes in units of powers of 1000: 1235152404 is "1.24 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Aligns rows of text in columns; the columns numbered in ``right`` are flushed right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flushed = set(right)
    return [
        "  ".join(
            cell.rjust(w) if i in flushed else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
        pattern = re.sub(r"\d+", "*", leaf.path)
        key = (pattern, leaf.shape, str(leaf.dtype), leaf.spec, leaf.reason, leaf.place)
        groups.setdefault(key, []).append(leaf)
    largest = sorted(groups.values(), key=lambda group: -sum(leaf.bytes for leaf in group))
    kept = {id(group) for group in largest[:MOST_ROWS]}
    rows: list[Row] = [(HEADS[0], "arrays", *HEADS[1:])]
    for group in groups.values():
        if id(group) in kept:
            path, *others = cells(group)
            rows.append((path, f"{len(group):,}", *others))
    return Table(rows, right=(1, 5), more=len(groups) - len(kept))


def cells(leaves: Sequence[Leaf]) -> Row:
    """Returns the cells of equal arrays under ``HEADS``."""
    leaf = leaves[0]
    return (
        leaf.path if len(leaves) == 1 else re.sub(r"\d+", "*", leaf.path),
        "x".join(map(str, leaf.shape)) or "scalar",
        str(leaf.dtype),
        str(leaf.spec).replace("PartitionSpec", "P"),
        size(sum(each.bytes_per_device for each in leaves)),
        leaf.reason,
    )


def totals_rows(groups: Mapping[str, Sequence[Leaf]]) -> list[Row]:
    """Returns the bytes of each group, in all and per device in each place, after a header."""
    used_places = {leaf.place for leaves in groups.values() for leaf in leaves}
    places = [place for place in PLACES if place in used_places]
    heads = ["bytes/device"] if places == ["device"] else [PLACES[place] for place in places]
    rows: list[Row] = [("", "bytes in all", *heads)]
    for name, leaves in groups.items():
        if leaves:
            in_all = size(sum(leaf.bytes for leaf in leaves))
            by_place = [size(bytes_in(place, leaves)) for place in places]
            rows.append((GROUPS[name], in_all, *by_place))
    return rows


def bytes_in(place: str, leaves: Iterable[Leaf]) -> int:
    """Returns the bytes per device of the arrays in ``place``."""
    return sum(leaf.bytes_per_device for leaf in leaves if leaf.place == place)
