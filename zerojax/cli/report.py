"""`zerojax report`: this machine's devices and versions.

`--json` prints an object with these keys:

- `python`: The version of Python.
- `devices`: One object a kind of device.
- `packages`: name, version and wanted of each package.
- `problem`: The reason for which JAX finds no devices; null if it finds some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from zerojax.cli import terminal
from zerojax.cli.options import AsJson

if TYPE_CHECKING:
    from zerojax.cli.machine import Devices, Machine, Package


def report(as_json: AsJson = False) -> None:
    """Shows the devices, and the versions of zerojax and of what it requires.

    If started as one of several processes, the report joins the others, and process 0 prints.

    Exits with 0, or with 1 if JAX finds no devices.
    """
    import jax

    from zerojax.cli.machine import machine
    from zerojax.distributed.join import init_distributed

    init_distributed()
    found = machine()
    if jax.distributed.is_initialized() and jax.process_index():
        return
    if as_json:
        terminal.print_json(found)
    else:
        show(found)
    if found.problem is not None:
        raise typer.Exit(1)


def show(found: Machine) -> None:
    """Prints the tables of a machine."""
    from zerojax.cli.machine import Package

    console = terminal.console()
    devices: dict[str, Callable[[Devices], str]] = {
        "device": lambda each: each.kind,
        "platform": lambda each: each.platform,
        "how many": lambda each: str(each.count),
        "says": _says,
    }
    packages: dict[str, Callable[[Package], str]] = {
        "package": lambda each: each.name,
        "version": lambda each: (
            each.version or ("run from its folder" if each.name == "zerojax" else "not installed")
        ),
        "wanted": lambda each: each.wanted,
    }
    console.print(terminal.table(devices, found.devices))
    python = Package("python", found.python)
    console.print(terminal.table(packages, (python, *found.packages)))
    if found.problem is not None:
        console.print(f"[bold red]JAX finds no devices:[/] {escape(found.problem)}", soft_wrap=True)


def _says(devices: Devices) -> str:
    from zerojax.plan.table import size  # imports JAX

    n = devices.processes
    says = [
        f"{n} process{'es' if n > 1 else ''}",
        ", ".join(devices.memories),
        "" if devices.limit is None else f"{size(devices.limit)} each for a program",
        devices.capability and f"compute capability {devices.capability}",
        devices.driver if devices.driver != devices.platform else "",
    ]
    return "; ".join(filter(None, says))
