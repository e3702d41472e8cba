"""The tables of `zerojax inspect`, and their JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerojax.cli import terminal
from zerojax.plan.table import columns, size

if TYPE_CHECKING:
    from zerojax.checkpoint.inspection import InspectedArray, InspectedStep, Inspection, Status

STYLES: dict[Status, str] = {
    "complete": "green",
    "files complete": "green",
    "not verifiable": "yellow",
    "damaged": "bold red",
}

RECORDED = ("stage", "compute_dtype", "mesh", "devices", "processes", "versions", "metrics")
"""The fields of a step's record that the JSON has."""

SHOWN = 20
"""The most problems of a step that are printed."""


def print_json(found: Inspection, *, leaves: bool = False) -> None:
    """Prints the contents of the tables as JSON, for every step."""
    newest = found.newest_intact
    terminal.print_json(
        dataclasses.asdict(dataclasses.replace(found, steps=()))
        | {"newest_intact": newest.step if newest else None}
        | {"steps": [_values(step, leaves) for step in found.steps]}
    )


def _values(step: InspectedStep, leaves: bool) -> dict[str, object]:
    names = ("step", "folder", "status", "saved", "form", "bytes_on_disk", "problems", "notes")
    values: dict[str, object] = {name: getattr(step, name) for name in names}
    values |= {"arrays": len(step.arrays), "bytes": step.sizes, "bytes_by_dtype": step.dtypes}
    if step.record:
        values |= step.record.model_dump(include={*RECORDED})
    if leaves:
        values["leaves"] = step.arrays
    return values


def show(found: Inspection, *, leaves: bool = False, only_one_step: bool = False) -> None:
    """Prints the steps, details of the last step that holds arrays, and the damage.

    Args:
      found: the inspection's results.
      leaves: Whether to list the arrays of the last step.
      only_one_step: Whether only one step was inspected.
    """
    console = terminal.console()
    console.print(_table(found))
    if with_arrays := [step for step in found.steps if step.arrays]:
        last = with_arrays[-1]
        details = columns([(f"{name}:", value) for name, value in _about(last)])
        for line in [f"{_named(last)}:", *(f"  {line}" for line in details)]:
            console.print(escape(line), soft_wrap=True)
        if leaves:
            console.print(_leaves(last))
        console.print("only the weights: python -m zerojax export CHECKPOINT OUT", soft_wrap=True)
    for name in found.unfinished:
        console.print(f"{escape(name)}: being saved, or left by a killed run", soft_wrap=True)
    for name in found.deleted:
        console.print(f"{escape(name)}: deleted, its files are still to go", soft_wrap=True)
    for note in dict.fromkeys(note for step in found.steps for note in step.notes):
        step_names = ", ".join(_named(step) for step in found.steps if note in step.notes)
        console.print(f"[yellow]{escape(step_names)}: {escape(note)}[/]", soft_wrap=True)
    for step in found.damaged:
        console.print(f"[bold red]{escape(_named(step))} is damaged:[/]", soft_wrap=True)
        for problem in step.problems[:SHOWN]:
            console.print(f"  [red]{escape(problem)}[/]", soft_wrap=True)
        if (more := len(step.problems) - SHOWN) > 0:
            console.print(f"  [red]and {more} more (--json has them all)[/]")
    if found.damaged:
        console.print(_restore_hint(found, only_one_step), soft_wrap=True)


def _named(step: InspectedStep) -> str:
    return step.folder if step.step is None else f"step {step.step}"


def _restore_hint(found: Inspection, only_one_step: bool) -> str:
    newest = found.newest_intact
    if newest:
        files = "'s files are" if newest.status == "files complete" else " is"
        return f"step {newest.step}{files} complete: restore(abstract_state, step={newest.step})"
    if only_one_step:
        return "other steps were not looked at: leave out --step"
    return "no step is known to be complete"


def _about(step: InspectedStep) -> list[tuple[str, str]]:
    rows = []
    if record := step.record:
        computed = f", computed in {record.compute_dtype}" if record.compute_dtype else ""
        mesh = ", ".join(f"{axis} {n}" for axis, n in record.mesh.items())
        plural = "es" if record.processes > 1 else ""
        rows += [
            ("state", f"{record.form}, stage {record.stage}{computed}"),
            ("mesh", f"{mesh} of {record.devices}, {record.processes} process{plural}"),
            ("versions", ", ".join(f"{name} {v}" for name, v in record.versions.items())),
        ]
    else:
        rows.append(("state", f"{step.form or 'arrays'}, without a record"))
    rows += [
        ("sizes", ", ".join(f"{group} {size(n)}" for group, n in step.sizes.items() if n)),
        ("dtypes", ", ".join(f"{dtype} {size(n)}" for dtype, n in step.dtypes.items())),
    ]
    if step.record and step.record.metrics:
        rows.append(("metrics", ", ".join(f"{k} {v:g}" for k, v in step.record.metrics.items())))
    return rows


def _table(found: Inspection) -> Table:
    columns: dict[str, Callable[[InspectedStep], str | Text]] = {
        "step": lambda each: each.folder if each.step is None else str(each.step),
        "saved, UTC": lambda each: (each.saved or "")[:16].replace("T", " "),
        "status": lambda each: Text(each.status, style=STYLES[each.status]),
        ">arrays": lambda each: f"{len(each.arrays):,}",
        ">bytes": lambda each: size(sum(each.sizes.values())),
        ">on disk": lambda each: size(each.bytes_on_disk),
        ">problems": lambda each: Text(
            f"{len(each.problems):,}" if each.problems else "", style="red"
        ),
    }
    return terminal.table(columns, found.steps)


def _leaves(step: InspectedStep) -> Table:
    columns: dict[str, Callable[[InspectedArray], str]] = {
        "array": lambda each: each.name,
        "shape": lambda each: "x".join(map(str, each.shape)) or "scalar",
        "dtype": lambda each: each.dtype,
        "spec": lambda each: "" if each.spec is None else f"P({', '.join(map(_entry, each.spec))})",
        ">bytes": lambda each: size(each.bytes),
    }
    return terminal.table(columns, step.arrays)


def _entry(entry: object) -> str:
    """Formats one dimension of a spec as Python code."""
    return repr(tuple(entry) if isinstance(entry, list) else entry)
