"""`zerojax watch RUN`: the figures of a run's `csv_monitor` in the terminal, while it trains."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.live import Live
from rich.table import Table

from zerojax.cli import terminal
from zerojax.cli.options import wrong_input

BARS = "▁▂▃▄▅▆▇█"


class Curve(NamedTuple):
    """The values of one CSV file.

    Attributes:
      name: The tag, with the folders between the run and the file.
      steps: The first column, samples or steps.
      values: The second column.
    """

    name: str
    steps: list[float]
    values: list[float]


def watch(
    run: Annotated[Path, typer.Argument(help="A folder with files of csv_monitor, at any depth.")],
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and end.")] = False,
    seconds: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
) -> None:
    """Draws loss, learning rate and every other figure that a run writes by its `csv_monitor`.

    Ends at Ctrl-C. Exits with 2 if there are no such files.
    """
    if not (curves := [*read(run)]):
        wrong_input(
            f"{run}: no files of csv_monitor; add "
            '"csv_monitor": {"enabled": true, "output_path": ..., "job_name": ...} to the config'
        )
    console = terminal.console()
    if once:
        console.print(drawn(curves))
        return
    with Live(drawn(curves), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(drawn([*read(run)]), refresh=True)


def read(run: Path) -> Iterator[Curve]:
    """Reads the CSV files below a folder; a row that is not complete yet is left out."""
    for path in sorted(run.rglob("*.csv")):
        with path.open(newline="", errors="replace") as file:
            rows = csv.reader(file)
            if next(rows, [""])[0] != "step":
                continue
            pairs = [pair for row in rows if (pair := _numbers(row))]
        if pairs:
            name = str(path.relative_to(run).with_suffix(""))
            yield Curve(name, [step for step, _ in pairs], [value for _, value in pairs])


def _numbers(row: Sequence[str]) -> tuple[float, float] | None:
    try:
        step, value = map(float, row)
    except ValueError:
        return None
    return step, value


def drawn(curves: Sequence[Curve], width: int = 30) -> Table:
    """Returns a row for each curve: its last step and value, its smallest, and a line of bars."""
    table = terminal.table("figure", ">step", ">last", ">smallest", "")
    for each in curves:
        finite = [value for value in each.values if math.isfinite(value)]
        smallest = f"{min(finite):.4g}" if finite else ""
        last = f"{each.values[-1]:.4g}"
        table.add_row(each.name, f"{each.steps[-1]:,.0f}", last, smallest, bars(each.values, width))
    return table


def bars(values: Sequence[float], width: int) -> str:
    """Returns a line of at most ``width`` bars, each the mean of as many values; "!" for a value
    that is not finite.

    Example:
      >>> bars([4.0, 2.0, 1.0, float("nan")], 4)
      '█▃▁!'
    """
    number = min(width, len(values))
    parts = [
        values[len(values) * i // number : len(values) * (i + 1) // number] for i in range(number)
    ]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BARS[round((mean - low) * scale)] if math.isfinite(mean) else "!" for mean in means
    )
