"""What the benchmarks share: a console, a record of where they ran, and a JSON file of results."""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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
    """A console wide enough for the tables when its output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def circumstances() -> dict[str, Any]:
    """Command, machine and versions: what a dated record of a result needs."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = " ".join(["python -m", *_module_and_arguments()])
    return {"command": command, "cores": os.cpu_count(), "versions": versions}


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write results with the circumstances they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**circumstances(), **results}, indent=2) + "\n")


def heading(title: str, machine: str = "") -> str:
    """How a record begins; ``machine`` is what else is to be said of it."""
    made_on = circumstances()
    versions = ", ".join(f"{name} {version}" for name, version in made_on["versions"].items())
    return (
        f"# {title}\n\nDate: {datetime.date.today()}. Command: `{made_on['command']}` (figures as "
        f"JSON beside this file).\nMachine: {made_on['cores']} CPU cores{machine}. "
        f"Versions: {versions}."
    )


def write_dated(
    folder: Path, name: str, title: str, results: Mapping[str, Any], *parts: str
) -> None:
    """A record of figures that no GPU was needed for: results as JSON, and a page of ``parts`` that
    begins with the title, both under today's date."""
    stem = folder / f"{datetime.date.today()}-{name}"
    write_json(stem.with_suffix(".json"), results)
    page = "\n\n".join([heading(title, ", no GPU"), *parts])
    stem.with_suffix(".md").write_text(page + "\n")


def markdown_table(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Headings and lines; all but the first ``texts`` columns hold numbers."""
    rule = ["---" if i < texts else "---:" for i in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def console_table(rows: Sequence[Sequence[str]], **keywords: Any) -> Table:
    """The same for a console; ``keywords`` are rich's."""
    table = Table(*rows[0], **keywords)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _module_and_arguments() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name if spec else Path(sys.argv[0]).name, *sys.argv[1:]]
