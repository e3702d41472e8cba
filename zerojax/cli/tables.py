"""Where the commands print, and how their tables look."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

_PIPED = 10_000


def console() -> Console:
    """Of stdout. Where that is no terminal, no cell is cut or wrapped: one thing is one line."""
    return Console(width=None if sys.stdout.isatty() else _PIPED, highlight=False)


def table(*heads: str) -> Table:
    """With those columns; one whose head begins with ">" is flushed right."""
    made = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        name = head.removeprefix(">")
        made.add_column(name, justify="right" if name != head else "left", overflow="fold")
    return made
