"""The tables of `zerojax report`, and their JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerojax.cli import terminal
from zerojax.plan.table import size

if TYPE_CHECKING:
    from zerojax.doctor.report import Devices, Report

LISTED = 2
"""The most missing requirements of an extra in the table; the JSON has all."""


def to_json(found: Report) -> dict[str, Any]:
    """Returns the contents of the tables as JSON values; null for an unknown figure."""
    return dataclasses.asdict(found)


def show(found: Report) -> None:
    """Prints tables of devices, versions, variables and extras."""
    console = terminal.console()
    if found.problem is None:
        heads = ("device", "platform", "how many", "says")
        console.print(_table(heads, map(_device, found.devices)))
    versions = [("python", found.python, "", "")]
    for package in found.packages:
        absent = "run from its folder" if package.name == "zerojax" else "not installed"
        versions.append((package.name, package.version or absent, package.wanted, package.remedy))
    console.print(_table(("package", "version", "wanted", "remedy"), versions))
    if found.environment:
        console.print(_table(("environment", "value"), found.environment.items()))
    extras = ((e.name, _yes(e.installed), e.remedy, _missing(e.missing)) for e in found.extras)
    console.print(_table(("extra", "installed", "remedy", "missing"), extras))
    if found.problem is not None:
        console.print(f"[bold red]JAX finds no devices:[/] {escape(found.problem)}", soft_wrap=True)


def _device(devices: Devices) -> tuple[str, ...]:
    n = devices.processes
    says = [f"{n} process{'es' if n > 1 else ''}", ", ".join(devices.memories)]
    if devices.limit is not None:
        says.append(f"{size(devices.limit)} each for a program")
    if devices.capability:
        says.append(f"compute capability {devices.capability}")
    if devices.driver != devices.platform:
        says.append(devices.driver)
    return devices.kind, devices.platform, str(devices.count), "; ".join(filter(None, says))


def _missing(requirements: Sequence[str]) -> str:
    """Returns the first requirements that are not met, and the number of the others."""
    more = len(requirements) - LISTED
    listed = ", ".join(requirements[:LISTED])
    return f"{listed} and {more} more" if more > 0 else listed


def _yes(works: bool) -> Text:
    return Text("yes", style="green") if works else Text("no", style="yellow")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> Table:
    table = terminal.table(*heads)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
