"""Lines and bars of a run on a terminal, printed by process 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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

    def print(self, line: str) -> None:
        """Prints a line above the bars, which then show their counts."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._display.task_ids:
            self._display.refresh()

    @contextlib.contextmanager
    def bar(
        self, name: str, total: int | None, completed: int = 0, *, keep: bool = False
    ) -> Iterator[Callable[..., None]]:
        """Shows a bar within the context, whose value advances it: by ``advance``, 1 by default,
        and to another text beside it, ``figures``.

        Args:
          name: The unit, before the count.
          total: The count at the end; None if unknown.
          completed: The count at the start.
          keep: Whether the bar stays on the screen after the context.
        """
        display = self._display
        task = display.add_task(name, total=total, completed=completed, figures="")
        display.start()
        try:
            yield lambda advance=1, **text: display.update(task, advance=advance, **text)
        finally:
            is_last = len(display.task_ids) == 1
            if not keep:
                display.remove_task(task)
            if is_last and not display.disable:  # a disabled one would print a line
                display.stop()
            if keep:
                display.remove_task(task)
