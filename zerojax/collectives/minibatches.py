"""Rows that one of several updates takes from the batch, sharded over the devices.

XLA would replicate rows that a program takes by index, and every device would compute on all of
them. A loop of updates over minibatches [n, rows, ...] shards the rows of each, see
:meth:`zerojax.collectives.gathering.Gatherer.by_rows`.
"""

from __future__ import annotations

from zerojax.graph.primitives import READS
from zerojax.graph.rows import RowDimensions
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def rows_at(eqn: Equation, rows: RowDimensions) -> int | None:
    """Returns the dimension of a result along which it has some of the rows of its operand; None if
    the equation takes no rows.

    Args:
      eqn: An equation of the update.
      rows: The dimensions along which rows of the batch lie.
    """
    if eqn.primitive.name not in READS or jaxprs.is_transposed(eqn):
        return None
    taken = rows.dims(eqn.outvars[0])
    return taken[0] if taken and rows.dims(eqn.invars[0]) else None
