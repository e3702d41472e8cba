"""Where the commands print: tables on stdout, and signs of work in progress on stderr."""

import sys

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

_PIPED = 10_000


def console() -> Console:
    """The console on stdout. Where stdout is no terminal, no cell is cut or wrapped."""
    return Console(width=None if sys.stdout.isatty() else _PIPED, highlight=False)


def table(*heads: str) -> Table:
    """A table with such columns; a head that begins with ">" makes a column flushed right."""
    made = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        name = head.removeprefix(">")
        made.add_column(name, justify="right" if name != head else "left", overflow="fold")
    return made


def bytes_bar() -> Progress:
    """A bar of bytes on the terminal behind stderr, gone at the end; nothing elsewhere."""
    return _progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    )


def spinner() -> Progress:
    """The same for work of unknown length: what is done, and for how long."""
    named = TextColumn("{task.description}", markup=False)
    return _progress(SpinnerColumn(), named, TimeElapsedColumn())


def steps_bar() -> Progress:
    """The same for a known number of steps."""
    named = TextColumn("{task.description}", markup=False)
    return _progress(SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), named)


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
