"""Convolutions with a group for each row of the batch, run by each device on its own rows.

The gradient of a convolution for each row, by ``jax.vmap`` of ``jax.grad``, is one convolution
whose groups are the rows. If the groups are sharded over devices, XLA's partitioner computes wrong
numbers for it, or builds a program that XLA's verifier rejects.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, PartitionSpec

from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.graph.search import contains, runs_regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


def has_rows_for_groups(eqn: Equation, rows: int | None, devices: int) -> bool:
    """Returns whether an equation is, or contains, a convolution with a group for each row.

    Groups are taken for rows if the devices can share the groups and no other dimension, or if
    ``jax.vmap`` produced the convolution: at worst this moves rows unnecessarily.

    Args:
      eqn: The equation; a call, a loop or a choice may contain the convolution.
      rows: The number of rows of the batch; None if unknown.
      devices: The number of devices that share the batch.
    """
    return devices > 1 and contains(eqn, _is_grouped_by_rows, rows, devices, enters=runs_regions)


def _is_grouped_by_rows(eqn: Equation, rows: int | None, n: int) -> bool:
    """Returns whether an equation is such a convolution, for ``n`` devices."""
    if eqn.primitive is not prims.conv_general_dilated_p:
        return False
    name, groups = _groups(eqn)
    if groups == 1 or groups % n:
        return False
    batch = eqn.invars[0].aval.shape[jaxprs.param(eqn, "dimension_numbers").lhs_spec[0]]
    of_batch = name == "batch_group_count"
    if not of_batch and batch % n:
        return True
    rows_in_batch = not of_batch and rows is not None and batch % rows == 0 and groups % rows != 0
    return jaxprs.is_batched(eqn) and not rows_in_batch


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
