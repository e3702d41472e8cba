"""The table of `zerojax plan --collectives`."""

from __future__ import annotations

import dataclasses
import json

from rich.markup import escape

from zerojax.cli import terminal
from zerojax.plan.table import size
from zerojax.step.collectives_table import HEADS, RIGHT, CollectivesTable


def show_collectives(table: CollectivesTable, *, as_json: bool) -> None:
    """Prints the collectives of a step: a table, or JSON for programs."""
    if as_json:
        rows = [dataclasses.asdict(row) for row in table.rows]
        print(json.dumps({"collectives": rows, "bytes_a_step": table.bytes_by_kind()}, indent=2))
        return
    console = terminal.console()
    heads = (f">{head}" if i in RIGHT else head for i, head in enumerate(HEADS))
    printed = terminal.table(*heads)
    for row in table.cells()[1:]:
        printed.add_row(*map(escape, row))
    console.print(printed)
    for kind, n in table.bytes_by_kind().items():
        console.print(f"{kind}: each device sends {size(n)} a step")
