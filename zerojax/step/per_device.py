"""A function of rows that each device runs on its own rows, as for kernels in a decorated step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.devices.mesh import SEQUENCE, are_present, batch_axes
from zerojax.xla.types import PyTree


def per_device(
    function: Callable[..., PyTree],
    mesh: Mesh,
    replicated: Collection[int],
    sharded: Mapping[str, int],
) -> Callable[..., PyTree]:
    """Implements :meth:`zerojax.api.Zero.per_device`."""
    name = getattr(function, "__name__", "the function")
    axes = batch_axes(mesh)
    axes_of = {0: axes}  # by dimension
    for axis, at in sharded.items():
        if axis not in mesh.shape or axis in axes:
            raise ValueError(
                f"per_device({name}): sharded names {axis!r}. Name an axis of the mesh "
                f"({', '.join(mesh.axis_names)}) that does not shard the batch."
            )
        is_dimension = isinstance(at, int) and not isinstance(at, bool) and at > 0
        # zero.sequence shards heads over its axis, also beside another axis.
        if not is_dimension or (axis != SEQUENCE and {*axes_of.get(at, ())} - {SEQUENCE}):
            raise ValueError(
                f"per_device({name}): sharded has {axis!r}: {at!r}. Give each axis a dimension of "
                "its own, 1 or more; dimension 0 is the batch's."
            )
        axes_of[at] = (*axes_of.get(at, ()), axis)
    parts = {at: math.prod(mesh.shape[axis] for axis in axes_of[at]) for at in axes_of}

    @functools.wraps(function)
    def over_rows(*args: PyTree) -> PyTree:
        for i, arg in enumerate(args):
            for path, x in jax.tree_util.tree_leaves_with_path(() if i in replicated else arg):
                for at, n in parts.items():
                    if x.shape[at] % n == 0 if at < len(x.shape) else at > 0:
                        continue
                    raise ValueError(
                        f"per_device({name}): argument {i}{jax.tree_util.keystr(path)} has shape "
                        f"{x.shape}, and the {n} devices of {' and '.join(axes_of[at])} do not "
                        f"divide its dimension {at}. Make it a multiple, or "
                        + ("remove the axis from sharded." if at else f"add {i} to replicated.")
                    )
        in_specs = tuple(
            PartitionSpec()
            if i in replicated
            else jax.tree.map(lambda x: spec_of_rank(len(x.shape)), arg)
            for i, arg in enumerate(args)
        )
        # One spec for results of any rank, so that it may be no longer than needed.
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=spec_of_rank(max(axes_of) + 1),
            # Other axes stay automatic: XLA shards over them.
            axis_names={*axes, *sharded},
            # With the check, results of a pallas_call must declare the axes that they vary over.
            check_vma=False,
        )
        with _traced_for(mesh):
            return mapped(*args)

    def spec_of_rank(rank: int) -> PartitionSpec:
        return PartitionSpec(*(axes_of.get(at) for at in range(rank)))

    return over_rows


def _traced_for(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Sets an absent device as default, because kernels ask the default device for its kind."""
    devices_exist = are_present(mesh)
    return contextlib.nullcontext() if devices_exist else jax.default_device(mesh.devices.flat[0])
