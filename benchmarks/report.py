"""Figures as benchmarks show them: a console, a heading with the circumstances, tables, JSON."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

Rows = Sequence[Sequence[str]]

WIDTH_WITHOUT_TERMINAL = 160
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "jax-cuda13-plugin",
)


def console() -> Console:
    """Returns a console that is wide enough for the tables when its output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def circumstances() -> dict[str, object]:
    """Returns the command, the machine and the versions of this run."""
    return {"command": " ".join(command()), "cores": os.cpu_count(), "versions": versions()}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, results: Mapping[str, object]) -> None:
    """Writes results with the circumstances of the run; dataclasses are written as objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**circumstances(), **results}, indent=2, default=dataclasses.asdict)
    path.write_text(text + "\n")


def heading(title: str, machine: str = "") -> str:
    """Returns the beginning of a record; ``machine`` describes the machine beyond its cores."""
    listed = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"# {title}\n\nDate: {datetime.date.today()}. Command: `{' '.join(command())}` (figures as "
        f"JSON beside this file).\nMachine: {os.cpu_count()} CPU cores{machine}. "
        f"Versions: {listed}."
    )


def markdown_table(rows: Rows, texts: int = 1) -> str:
    """Returns headings and lines; all but the first ``texts`` columns hold numbers."""
    rule = ["---" if i < texts else "---:" for i in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def console_table(rows: Rows, title: str = "", show_lines: bool = False) -> Table:
    """Returns the rows as a table for a console."""
    table = Table(*rows[0], title=title or None, show_lines=show_lines)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def command() -> list[str]:
    """Returns the module that runs, as a command, and its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = f"python -m {spec.name}" if spec else Path(sys.argv[0]).name
    return [module, *sys.argv[1:]]
