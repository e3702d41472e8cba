"""`zerojax explain CONFIG`: the effect of every key of a DeepSpeed or Accelerate config.

`--json` prints an object with these keys:

- `config`: The path of the config.
- `keys`: One object a key: key, given (absent if the config lacks the key), resolved, became, why.
- `problems`: Messages, for which the config is refused; empty if it is accepted.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from zerojax.cli import terminal
from zerojax.cli.options import AsJson, wrong_input
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.explain import NOT_GIVEN, Became, Row
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
    problems, console = explanation.problems, terminal.console()
    if as_json:
        rows = [row._asdict() for row in explanation.rows]
        keys = [{name: x for name, x in row.items() if x is not NOT_GIVEN} for row in rows]
        terminal.print_json({"config": config, "keys": keys, "problems": problems})
    else:
        columns: dict[str, Callable[[Row], str | Text]] = {
            "key": lambda row: row.key,
            "given": lambda row: "" if row.given is NOT_GIVEN else as_text(row.given, 40),
            "resolved": lambda row: "" if row.resolved is None else as_text(row.resolved, 40),
            "became": lambda row: Text(row.became, style=STYLES[row.became], no_wrap=True),
            "why": lambda row: row.why,
        }
        console.print(terminal.table(columns, explanation.rows))
        counts = Counter(row.became for row in explanation.rows)
        summary = ", ".join(f"{counts[became]} {became}" for became in STYLES if counts[became])
        console.print(f"{escape(str(config))}: {summary}", soft_wrap=True)
        if (n := len(problems)) > 0:
            console.print(f"[bold red]{n} problem{'s' if n > 1 else ''}:[/]")
        for problem in problems:
            console.print(f"  {escape(problem)}", soft_wrap=True)
    if problems:
        raise typer.Exit(2)


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
