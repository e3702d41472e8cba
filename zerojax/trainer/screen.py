"""Lines and bars of a run on a terminal, printed by process 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Screen:
    """A console, and one display for all bars that are open, as a terminal can have only one.

    Args:
      bars: Whether a terminal shows bars; elsewhere there are only lines.
    """

    def __init__(self, bars: bool) -> None:
        is_main = jax.process_index() == 0
        self._console = Console(quiet=not is_main)
        self._display = Progress(
            TextColumn("{task.description} {task.completed:>5}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (bars and is_main and self._console.is_terminal),
            expand=True,
        )
        self._open = 0

    def print(self, line: str) -> None:
        """Prints a line above the bars, which then show their counts."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._open:
            self._display.refresh()

    @contextlib.contextmanager
    def bar(
        self, name: str, total: int | None, completed: int = 0, *, keep: bool = False
    ) -> Iterator[Bar]:
        """Shows a bar within the context.

        Args:
          name: The unit, before the count.
          total: The count at the end; None if unknown.
          completed: The count at the start.
          keep: Whether the bar stays on the screen after the context.
        """
        task = self._display.add_task(name, total=total, completed=completed, figures="")
        if not self._open and not self._display.disable:
            self._display.start()
        self._open += 1
        try:
            yield Bar(self._display, task)
        finally:
            self._open -= 1
            if not keep:
                self._display.remove_task(task)
            if not self._open and not self._display.disable:
                self._display.stop()
            if keep:
                self._display.remove_task(task)


class Bar:
    """A bar of a :class:`Screen`."""

    def __init__(self, display: Progress, task: TaskID) -> None:
        self._display, self._task = display, task

    def advance(self, count: int = 1) -> None:
        """Advances the bar."""
        self._display.advance(self._task, count)

    def show(self, figures: str) -> None:
        """Replaces the text beside the bar."""
        self._display.update(self._task, figures=figures)
