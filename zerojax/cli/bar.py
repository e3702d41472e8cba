"""How a command shows that it is at work: a bar where bytes can be counted, else a spinner."""

import sys

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


def bytes_bar() -> Progress:
    """On the terminal behind stderr, and gone when it is done; nothing elsewhere."""
    return _progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    )


def spinner() -> Progress:
    """The same with what is being done and for how long."""
    named = TextColumn("{task.description}", markup=False)
    return _progress(SpinnerColumn(), named, TimeElapsedColumn())


def steps_bar() -> Progress:
    """The same with a bar, where it is known how many steps there are."""
    named = TextColumn("{task.description}", markup=False)
    return _progress(SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), named)


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
