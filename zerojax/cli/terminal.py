"""Output of the commands: tables on stdout, progress on stderr."""

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
    """Returns a console on stdout. If stdout is not a terminal, no cell is cut or wrapped."""
    return Console(width=None if sys.stdout.isatty() else _PIPED, highlight=False)


def table(*heads: str) -> Table:
    """Creates a table with these columns; a head that begins with ">" aligns its column right."""
    result = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in heads:
        name = head.removeprefix(">")
        result.add_column(name, justify="right" if name != head else "left", overflow="fold")
    return result


def bytes_bar() -> Progress:
    """Creates a bar of bytes on stderr, removed at the end; no output unless on a terminal."""
    return _progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    )


def spinner() -> Progress:
    """Creates a progress line for work of unknown length, with its description and elapsed time."""
    description = TextColumn("{task.description}", markup=False)
    return _progress(SpinnerColumn(), description, TimeElapsedColumn())


def steps_bar() -> Progress:
    """Creates a progress bar for a known number of steps."""
    description = TextColumn("{task.description}", markup=False)
    return _progress(
        SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), description
    )


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
