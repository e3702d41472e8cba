"""Output of the commands: tables and JSON on stdout, progress on stderr."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

R = TypeVar("R")
_PIPED = 10_000


def console() -> Console:
    """Returns a console on stdout, as wide as the terminal, or as ``COLUMNS`` says. Elsewhere no
    cell is wrapped."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_known else _PIPED, highlight=False)


def table(columns: Mapping[str, Callable[[R], str | Text]], rows: Iterable[R]) -> Table:
    """Returns a table with a line for each row, without the columns that are empty in every line.

    Args:
      columns: By the head of a column, what it says of a row. A head that begins with ">" aligns
        its column right; rich's markup in a string is text.
      rows: The rows.
    """
    result = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    lines = [[cell(row) for cell in columns.values()] for row in rows]
    is_used = [any(map(len, cells)) for cells in zip(*lines, strict=True)]
    for head in itertools.compress(columns, is_used):
        name = head.removeprefix(">")
        right = name != head  # of figures, which stay whole
        justify: Literal["left", "right"] = "right" if right else "left"
        result.add_column(name, justify=justify, overflow="fold", no_wrap=right)
    for line in lines:
        cells = itertools.compress(line, is_used)
        result.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return result


def print_json(value: object) -> None:
    """Prints a result as JSON, see :func:`as_json`."""
    print(json.dumps(as_json(value), indent=2))


def as_json(value: object) -> object:
    """Returns a result as JSON values: dataclasses and named tuples by their fields, and numbers
    that JSON lacks, such as the infinity that 1e999 reads as, and other objects as strings.

    Example:
      >>> as_json({"a": (1, math.inf), 2: None})
      {'a': [1, 'inf'], '2': None}
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


Update = Callable[..., None]
"""A function that updates a progress bar: `completed`, `total`, `description`."""


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Update]:
    """Opens a progress bar on stderr, removed at the end; no output unless on a terminal."""
    is_terminal = sys.stderr.isatty()
    with Progress(
        console=Console(stderr=True), transient=True, disable=not is_terminal
    ) as progress:
        yield functools.partial(progress.update, progress.add_task(description, total=None))
