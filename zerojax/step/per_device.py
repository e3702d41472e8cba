"""A function of rows, run by each device on its own rows: how a decorated step calls kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.devices.mesh import batch_axes, batch_devices


def per_device(
    function: Callable[..., Any], mesh: Mesh, whole: Collection[int]
) -> Callable[..., Any]:
    """See :meth:`zerojax.api.Zero.per_device`."""
    name = getattr(function, "__name__", "the function")
    n, axes = batch_devices(mesh), batch_axes(mesh)

    @functools.wraps(function)
    def over_rows(*args: Any) -> Any:
        for i, arg in enumerate(args):
            for path, x in jax.tree_util.tree_leaves_with_path(() if i in whole else arg):
                if not x.shape or x.shape[0] % n:
                    raise ValueError(
                        f"per_device({name}): argument {i}{jax.tree_util.keystr(path)} has shape "
                        f"{x.shape}, whose first dimension does not divide among {n} devices "
                        f"(axes {', '.join(axes)}): make it a multiple, or add {i} to `whole`"
                    )
        specs = tuple(
            PartitionSpec() if i in whole else PartitionSpec(axes) for i in range(len(args))
        )
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=specs,
            out_specs=PartitionSpec(axes),
            axis_names=set(axes),
            check_vma=False,
        )
        return mapped(*args)

    return over_rows
