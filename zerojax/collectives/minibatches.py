"""Rows that one of several updates takes from the batch, each on its own device.

XLA would have all rows that a program takes by index on every device, and each device would compute
on all of them. A loop of updates over minibatches [n, rows, ...] has theirs sharded, see
:meth:`zerojax.collectives.gathering.Gatherer.by_rows`.
"""

from __future__ import annotations

from typing import Any

from zerojax.graph.primitives import READS
from zerojax.xla import jaxprs


def rows_at(eqn: Any, rows: int | None) -> int | None:
    """The dimension of a result that has rows taken from the batch; None where no such is known.

    Args:
      eqn: An equation of the update.
      rows: Of the batch [rows, ...], or of its minibatches [n, rows / n, ...] together.
    """
    if rows is None or eqn.primitive.name not in READS or jaxprs.is_transposed(eqn):
        return None
    batch, taken = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if batch[:1] == (rows,):
        return 0 if taken[1:] == batch[1:] else None
    if len(batch) < 2 or batch[0] * batch[1] != rows:
        return None
    return {(1, *batch[1:]): 1, batch[1:]: 0}.get(taken)
