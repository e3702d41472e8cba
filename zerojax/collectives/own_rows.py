"""Equations that each device runs on its own rows, where XLA's partitioner would not.

The gradient of a convolution for each row, by ``jax.vmap`` of ``jax.grad``, is one convolution
whose groups are the rows. If the groups are sharded over devices, XLA's partitioner computes wrong
numbers for it, or builds a program that XLA's verifier rejects.

XLA would replicate rows that a program takes by index, and every device would compute on all of
them. A loop of updates over minibatches [n, rows, ...] shards the rows of each, see
:meth:`zerojax.collectives.gathering.Gatherer.by_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, PartitionSpec

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.graph.primitives import READS
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import contains, runs_regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def has_rows_for_groups(eqn: Equation, rows: RowDimensions, devices: int) -> bool:
    """Returns whether an equation is, or contains, a convolution with a group for each row.

    Groups are also taken for rows if the devices cannot share the convolution's batch, or if
    ``jax.vmap`` produced it and its batch is not known to have rows: at worst this moves rows
    unnecessarily.

    Args:
      eqn: The equation; a call, a loop or a choice may contain the convolution.
      rows: The dimensions along which rows of the batch lie.
      devices: The number of devices that share the batch.
    """
    return devices > 1 and contains(eqn, _is_grouped_by_rows, rows, devices, enters=runs_regions)


def _is_grouped_by_rows(eqn: Equation, rows: RowDimensions, n: int) -> bool:
    """Returns whether an equation is such a convolution, for ``n`` devices."""
    if eqn.primitive is not prims.conv_general_dilated_p:
        return False
    name, groups = _groups(eqn)
    if groups == 1 or groups % n:
        return False
    lhs, kernel, _ = jaxprs.param(eqn, "dimension_numbers")
    batch, group = (None, lhs[0]) if name == "batch_group_count" else (lhs[0], lhs[1])
    known, of_kernel = (rows.dims(v) for v in eqn.invars)
    if group in known or kernel[0] in of_kernel:
        return True
    # Where rows have been lost on the way, XLA's numbers would be wrong without an error.
    by_vmap, shape = jaxprs.is_batched(eqn), eqn.invars[0].aval.shape
    cannot_share_batch = batch is not None and bool(shape[batch] % n)
    return cannot_share_batch or (by_vmap and batch not in known)


def on_own_rows(eqn: Equation, values: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Runs such a convolution on each device's own rows; operands may be sharded or not."""
    axes, n = batch_axes(mesh), batch_devices(mesh)
    lhs, rhs, out = jaxprs.param(eqn, "dimension_numbers")
    name, groups = _groups(eqn)
    own_params = {**eqn.params, name: groups // n}
    lhs_dimension = lhs[0] if name == "batch_group_count" else lhs[1]

    def sharded_at(dimension: int) -> PartitionSpec:
        return PartitionSpec(*(None,) * dimension, axes)

    result: jax.Array = jax.shard_map(
        lambda *x: jaxprs.bind(eqn, x, own_params)[0],
        mesh=mesh,
        in_specs=(sharded_at(lhs_dimension), sharded_at(rhs[0])),
        out_specs=sharded_at(out[1]),
        axis_names={*axes},
        check_vma=False,
    )(*values)
    return result


def _groups(eqn: Equation) -> tuple[str, int]:
    """Returns the name of the parameter that counts the groups, and their number."""
    name = "feature_group_count"
    if jaxprs.param(eqn, name) == 1:
        name = "batch_group_count"
    return name, jaxprs.param(eqn, name)


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
