"""`zerojax report`: this machine's devices and versions.

`--json` prints an object with these keys:

- `python`: The version of Python.
- `devices`: One object a kind of device.
- `packages`: name, version and wanted of each package.
- `problem`: The reason for which JAX finds no devices; null if it finds some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from zerojax.cli import terminal
from zerojax.cli.options import AsJson

if TYPE_CHECKING:
    from zerojax.cli.machine import Devices, Machine


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
    console = terminal.console()
    if found.problem is None:
        heads = ("device", "platform", "how many", "says")
        console.print(terminal.table(heads, map(_device, found.devices)))
    versions = [("python", found.python, "")]
    for package in found.packages:
        absent = "run from its folder" if package.name == "zerojax" else "not installed"
        versions.append((package.name, package.version or absent, package.wanted))
    console.print(terminal.table(("package", "version", "wanted"), versions))
    if found.problem is not None:
        console.print(f"[bold red]JAX finds no devices:[/] {escape(found.problem)}", soft_wrap=True)


def _device(devices: Devices) -> tuple[str, ...]:
    from zerojax.plan.table import size  # imports JAX

    n = devices.processes
    says = [f"{n} process{'es' if n > 1 else ''}", ", ".join(devices.memories)]
    if devices.limit is not None:
        says.append(f"{size(devices.limit)} each for a program")
    if devices.capability:
        says.append(f"compute capability {devices.capability}")
    if devices.driver != devices.platform:
        says.append(devices.driver)
    return devices.kind, devices.platform, str(devices.count), "; ".join(filter(None, says))
