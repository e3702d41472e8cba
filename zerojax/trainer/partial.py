"""Mean loss of a partial update, over only those rows that count.

The batch has the shape of a full update, so that it divides among the devices and micro-batches;
its last rows are copies that pad it. If the loss is a pair of values and weights per row, copies
get the weight 0. Any other loss is split into row-wise computations and reductions over rows, which
exclude the copies (:class:`zerojax.evaluation.rows.ByRows`). If the loss combines rows in another
way, as batch statistics do, it is computed from the batch without the copies; this requires a
single micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax.accumulation.symbolic import TracedRows
from zerojax.evaluation.batch import like
from zerojax.evaluation.rows import ByRows, TracedFunction
from zerojax.evaluation.undivided import Undivided
from zerojax.trace.gradients import weighted_mean
from zerojax.trainer.losses import loss_entry, mean_loss
from zerojax.xla.types import PyTree, Shaped


class Partial(NamedTuple):
    """Numbers of rows of a partial update.

    Attributes:
      rows: The number of rows that count, the first of the batch.
      full: Rows of a full update.
      times: Micro-batches of an update.
    """

    rows: int
    full: int
    times: int

    def batch_like(self, sample: Mapping[str, Shaped]) -> tuple[PyTree, jax.ShapeDtypeStruct]:
        """Returns the shapes of a full batch like ``sample``, and of the mask of its rows."""
        return like(sample, self.full), jax.ShapeDtypeStruct((self.full,), bool)


def partial_mean(
    function: Callable[[PyTree, PyTree], tuple[object, PyTree]],
    args: PyTree,
    given: PyTree,
    partial: Partial | None,
    *,
    remembers: bool,
) -> tuple[jax.Array, PyTree]:
    """Returns the mean loss of the rows that count, and the rest of the state after the update.

    Args:
      function: ``function(args, batch)`` returns the loss in any of its forms, and the rest of the
        state.
      args: A tree of arrays.
      given: Arrays [rows, ...] of the global batch or of a micro-batch; in a partial update a pair
        of them and bool [rows], True for rows that count.
      partial: The numbers of rows; None if all rows count.
      remembers: Whether the rest of the state may depend on the rows.

    Raises:
      ValueError: The loss combines rows in a way other than a reduction, and the update has several
        micro-batches.
    """
    if partial is None:
        outputs, changed = function(args, given)
        return mean_loss(outputs), changed
    batch, counts = given
    loss = jax.eval_shape(lambda *given: loss_entry(function(*given)[0]), args, batch)
    shapes = [x.shape for x in loss] if isinstance(loss, tuple) else []
    by_weights = len(shapes) == 2 and shapes[0] == shapes[1] and shapes[0][:1] == counts.shape
    if by_weights and not remembers:
        outputs, changed = function(args, batch)
        values, weights = loss_entry(outputs)
        weights = jnp.asarray(weights)
        mask = counts.reshape(-1, *[1] * (weights.ndim - 1))
        return weighted_mean(values, jnp.where(mask, weights, 0)), changed
    try:
        return _by_rows(function, args, batch, counts, partial)
    except Undivided as reason:
        if partial.times > 1:
            raise ValueError(
                f"an epoch's last update has {partial.rows} of {partial.full} rows, and under "
                f"accumulation their loss cannot be computed separately: {reason}. Return a "
                "pair (values, weights) of rows from the loss, set "
                f"gradient_accumulation_steps to 1, or pass a multiple of {partial.full} rows"
            ) from None
    outputs, changed = function(args, jax.tree.map(lambda x: x[: partial.rows], batch))
    return mean_loss(outputs), changed


def _by_rows(
    function: Callable[[PyTree, PyTree], tuple[object, PyTree]],
    args: PyTree,
    batch: PyTree,
    counts: jax.Array,
    partial: Partial,
) -> tuple[jax.Array, PyTree]:
    """Computes :func:`partial_mean` from row-wise computations and reductions over rows.

    Raises:
      Undivided: The function combines rows in a way other than a reduction.
    """
    batch_rows = counts.shape[0]
    # For a micro-batch only the equations matter, not this number of rows: accumulation takes the
    # numbers in them from the trace of the global batch.
    full_rows = partial.rows if batch_rows == partial.full else batch_rows + 1

    def mean(args: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        outputs, changed = function(args, batch)
        return mean_loss(outputs), changed

    rows = TracedRows.of(full_rows, batch_rows)
    batch_leaves, arg_leaves = jax.tree.leaves(batch), jax.tree.leaves(args)
    is_batch = [False] * len(arg_leaves) + [True] * len(batch_leaves)

    def traced(n: int) -> TracedFunction:
        closed, out = jax.make_jaxpr(mean, return_shape=True)(args, like(batch, n))
        return TracedFunction(closed, is_batch, jax.tree.structure(out))

    part = traced(rows.traced[1])
    try:
        full = traced(full_rows)
    except Exception as error:
        raise Undivided(f"on {full_rows} rows it fails ({type(error).__name__})") from error
    divided = ByRows(full, part, rows, padded=True, differentiated=True, noise=True)
    by_rows = divided(batch_rows)
    if by_rows.stacked:
        raise Undivided("the state has an array with rows of the batch")
    totals, _ = by_rows.part([*arg_leaves, *batch_leaves], counts)
    out_leaves = by_rows.finish([*arg_leaves, *[None] * len(batch_leaves)], totals, [])
    return jax.tree.unflatten(part.out, out_leaves)  # type: ignore[no-any-return]
