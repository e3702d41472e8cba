"""Which equations take each row for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.accumulation.kinds import FIXED, RowKind
from zerojax.accumulation.row_rules import RULES
from zerojax.xla.jaxprs import param


class Undivided(Exception):
    """A function cannot be run some rows at a time; the message says why."""


class Sizes(NamedTuple):
    """Rows of the whole batch, and of the part that runs at a time."""

    whole: int
    part: int


# Of each operand and result: the dimension of rows and the entries it has for each; None without.
Rows = Sequence[tuple[int, int] | None]

SHAPES: Mapping[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("shape", "sharding"),
    "reshape": ("new_sizes", "sharding"),
    "iota": ("shape", "sharding"),
    "slice": ("limit_indices", "start_indices"),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("slice_sizes",),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min"), ("update_jaxpr",)),
}
"""Parameters that say a shape."""


def goes_by_rows(eqn: Any, ins: Rows, outs: Rows) -> bool:
    """Whether an equation takes each row for itself.

    The rules are those of accumulation. Here the shapes say where a result has its rows, so that
    a rule has to lead to the same dimension, with all entries of a row beside each other.

    Args:
      eqn: The equation on the whole batch.
      ins, outs: The rows of its operands and of its results; all its results have rows.
    """
    if all(rows is None for rows in ins):  # the same in each row
        name = eqn.primitive.name
        along = param(eqn, "dimension") if name == "iota" else None
        return name in ("broadcast_in_dim", "iota") and along != (outs[0] or (None,))[0]
    if eqn.primitive.name not in RULES:
        return False
    kinds = [FIXED if rows is None else RowKind("rows", dim=rows[0], outer=1) for rows in ins]
    kind = RULES[eqn.primitive.name](eqn, kinds)
    if kind is None or not kind.rows or kind.outer != 1:
        return False
    return all(rows is not None and rows[0] == kind.dim for rows in outs)
