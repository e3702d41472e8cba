"""`zerojax explain CONFIG`: the effect of every key of a DeepSpeed or Accelerate config.

`--json` prints an object with these keys:

- `config`: The path of the config.
- `keys`: One object a key: key, given (absent if the config lacks the key), resolved, became, why.
- `problems`: Messages, for which the config is refused; empty if it is accepted.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from zerojax.cli import terminal
from zerojax.cli.options import AsJson, wrong_input
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.explain import NOT_GIVEN, Became, Explanation, Row
from zerojax.config.explain import explain as explained

STYLES: dict[Became, str] = {
    "honoured": "green",
    "left to XLA": "blue",
    "left to launch": "blue",
    "no effect": "yellow",
    "not judged": "yellow",
    "default": "cyan",
    "resolved": "cyan",
    "refused": "bold red",
    "wrong": "bold red",
}


def explain(
    config: Annotated[
        Path, typer.Argument(help="A DeepSpeed config in JSON or HJSON, or Accelerate's YAML.")
    ],
    as_json: AsJson = False,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Compute the batch sizes for N data-parallel devices."),
    ] = None,
    auto: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help='The value of an "auto", such as scheduler.params.total_num_steps=300; '
            "may be repeated.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every key that zerojax knows.")] = False,
) -> None:
    """Shows for every key of CONFIG whether it is honoured, left to XLA or refused, and why.

    Besides the keys of CONFIG, the table lists the defaults that change numbers.

    Exits with 0 if zerojax.zero(CONFIG) (or, with autotuning enabled, zerojax fit) would accept
    the config, and with 2 if it would not, or if the file cannot be read.
    """
    try:
        explanation = explained(config, auto=stand_ins(auto or []), devices=devices, every=every)
    except ConfigError as error:
        wrong_input(error)
    if as_json:
        print(json.dumps(to_json(str(config), explanation), indent=2, default=str))
    else:
        show(str(config), explanation)
    if explanation.problems:
        raise typer.Exit(2)


def to_json(source: str, found: Explanation) -> dict[str, Any]:
    """Returns the table as JSON values; rows of keys that CONFIG does not have lack `given`.

    Example:
      >>> from zerojax.config.explain import Row
      >>> row = Row("gradient_clipping", NOT_GIVEN, 1.0, "default", "DeepSpeed's")
      >>> to_json("a.json", Explanation((row,), ()))["keys"]
      [{'key': 'gradient_clipping', 'resolved': 1.0, 'became': 'default', 'why': "DeepSpeed's"}]
    """
    rows = [
        {name: _finite(value) for name, value in row._asdict().items() if value is not NOT_GIVEN}
        for row in found.rows
    ]
    return {"config": source, "keys": rows, "problems": list(found.problems)}


def _finite(value: object) -> object:
    """Replaces numbers that JSON lacks by strings, such as the infinity that 1e999 reads as."""
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show(source: str, found: Explanation) -> None:
    """Prints the table, the number of keys by their effect, and the problems."""
    console = terminal.console()
    console.print(_table(found.rows, grouped=sys.stdout.isatty()))
    counts = Counter(row.became for row in found.rows)
    summary = ", ".join(f"{counts[became]} {became}" for became in STYLES if counts[became])
    console.print(f"{escape(source)}: {summary}", soft_wrap=True)
    if found.problems:
        n = len(found.problems)
        console.print(f"[bold red]{n} problem{'s' if n > 1 else ''}:[/]")
    for problem in found.problems:
        console.print(f"  {escape(problem)}", soft_wrap=True)


def _table(rows: Sequence[Row], grouped: bool) -> Table:
    """Builds the table; if grouped, a section's name is a row above its keys: lines stay short."""
    table = terminal.table("key", "given", "resolved")
    table.add_column("became", no_wrap=True)
    table.add_column("why")
    previous_section = ""
    for row in rows:
        section, _, name = row.key.rpartition(".")
        if grouped and section and section != previous_section:
            table.add_row(f"[bold]{escape(section)}[/]")
        previous_section = section
        key = f"  {name}" if grouped and section else row.key
        given = "" if row.given is NOT_GIVEN else as_text(row.given, 40)
        resolved = "" if row.resolved is None else as_text(row.resolved, 40)
        became = f"[{STYLES[row.became]}]{row.became}[/]"
        table.add_row(escape(key), escape(given), escape(resolved), became, escape(row.why))
    return table


def stand_ins(given: list[str]) -> dict[str, object] | None:
    """Parses KEY=VALUE pairs into a mapping; a value that is not JSON is a string.

    Example:
      >>> stand_ins(["a.b=300", "c=linear"])
      {'a.b': 300, 'c': 'linear'}
    """
    values: dict[str, object] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}", param_hint="--auto")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values or None
