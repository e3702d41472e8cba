"""The page of the command line, generated from the parsers."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command
from zerojax.__main__ import COMMANDS, app

NAME = "commands.md"

OPENING = """# Command line

`python -m zerojax COMMAND`, or `zerojax COMMAND` where the package is installed.

- Every command exits with status 2 for wrong input, after one message on stderr.
- Tables adapt to the terminal; if stdout is not a terminal, no cell is cut.
- With `--json` a command prints one JSON object in place of its tables, with sizes
  in bytes and times in seconds.
- `zerojax --install-completion` adds completion of commands and options to bash, zsh,
  fish or PowerShell; `zerojax --show-completion` prints the script.

| command | |
| --- | --- |
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    files.append(File.generated(config, NAME, content=page()))
    return files


def page() -> str:
    """Returns the page: every command with its arguments, options and JSON."""
    group: Any = get_command(app)
    rows = "".join(
        f"| [`{name}`](#{name}) | {line} |\n" for name, line in COMMANDS.items()
    )
    sections = (_section(name, group.get_command(None, name)) for name in COMMANDS)
    return OPENING + rows + "\n" + "\n".join(sections)


def _section(name: str, command: Any) -> str:
    context = typer.Context(command)
    context.info_name = f"python -m zerojax {name}"
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = [f"## {name}", "", "```", usage, "```", "", command.help.strip(), ""]
    lines += ["| argument or option | |", "| --- | --- |"]
    records = (parameter.get_help_record(context) for parameter in command.params)
    lines += [
        f"| `{_cell(names)}` | {_cell(text)} |" for names, text in filter(None, records)
    ]
    if keys := _json_keys(command):
        lines += ["", "The keys of `--json`:", "", "| key | |", "| --- | --- |"]
        lines += [f"| `{key}` | {_cell(meaning)} |" for key, meaning in keys.items()]
    return "\n".join([*lines, ""])


def _json_keys(command: Any) -> dict[str, str]:
    """Returns the keys that the docstring of the command's module lists."""
    text = sys.modules[command.callback.__module__].__doc__ or ""
    found = re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", text, re.M)
    return {key: " ".join(meaning.split()) for key, meaning in found}


def _cell(text: str) -> str:
    """Escapes what would end a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
