"""Short tables as the ``repr`` of objects, with HTML for notebooks from the same rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from html import escape

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
      has_heads: Whether the first row has the names of the columns.
      more: The number of rows that were left out.
    """

    rows: Sequence[Row]
    right: Sequence[int] = ()
    has_heads: bool = False
    more: int = 0

    def lines(self) -> list[str]:
        """Returns the rows as lines of text."""
        more = [f"... {self.more:,} more rows"] if self.more else []
        return [f"  {line}".rstrip() for line in [*columns(self.rows, self.right), *more]]

    def html(self) -> str:
        """Returns the rows as an HTML table."""
        more = f"<p>... {self.more:,} more rows</p>" if self.more else ""
        return f"<table>{''.join(map(self._html_row, range(len(self.rows))))}</table>{more}"

    def _html_row(self, number: int) -> str:
        tag = "th" if self.has_heads and number == 0 else "td"
        aligned = ("right" if i in self.right else "left" for i in range(len(self.rows[number])))
        cells = zip(self.rows[number], aligned, strict=True)
        return (
            "<tr>"
            + "".join(f'<{tag} style="text-align:{a}">{escape(x)}</{tag}>' for x, a in cells)
            + "</tr>"
        )


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

    def html(self) -> str:
        """Returns the summary as HTML."""
        title = escape(self.title).replace("\n", "<br>")
        tables = "".join(table.html() for table in self.tables if table.rows)
        return f"<p><b>{title}</b></p>{tables}" + "".join(f"<p>{escape(x)}</p>" for x in self.notes)


class Summarized:
    """An object whose ``repr``, and display in a notebook, is its :class:`Summary`."""

    def summary(self) -> Summary:
        """Returns a title and a few rows that describe the object."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary().html()


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
    return Table(rows, right=(1, 5), has_heads=True, more=len(groups) - len(kept))


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
