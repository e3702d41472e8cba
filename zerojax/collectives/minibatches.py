"""Rows that one of several updates takes from the batch, sharded over the devices.

XLA would replicate rows that a program takes by index, and every device would compute on all of
them. A loop of updates over minibatches [n, rows, ...] shards the rows of each, see
:meth:`zerojax.collectives.gathering.Gatherer.by_rows`.
"""

from __future__ import annotations

from zerojax.graph.primitives import READS
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def rows_at(eqn: Equation, rows: int | None) -> int | None:
    """Returns the dimension of a result along which it has rows of the batch; None if the result is
    not known to consist of rows of the batch.

    Args:
      eqn: An equation of the update.
      rows: The number of rows of the batch [rows, ...], or of its minibatches [n, rows / n, ...]
        together.
    """
    if rows is None or eqn.primitive.name not in READS or jaxprs.is_transposed(eqn):
        return None
    batch, taken = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if batch[:1] == (rows,):
        return 0 if taken[1:] == batch[1:] else None
    if len(batch) < 2 or batch[0] * batch[1] != rows:
        return None
    return {(1, *batch[1:]): 1, batch[1:]: 0}.get(taken)
