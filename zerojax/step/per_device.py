"""A function of rows that each device runs on its own rows, as for kernels in a decorated step."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.devices.mesh import SEQUENCE, are_present, batch_axes, batch_devices
from zerojax.xla.types import PyTree, Shaped


def per_device(
    function: Callable[..., PyTree],
    mesh: Mesh,
    replicated: Collection[int],
    sharded: Mapping[str, int],
) -> Callable[..., PyTree]:
    """Implements :meth:`zerojax.api.Zero.per_device`."""
    name = getattr(function, "__name__", "the function")
    n, axes = batch_devices(mesh), batch_axes(mesh)
    for axis in sharded:
        if axis not in mesh.shape or axis in axes:
            raise ValueError(
                f"per_device({name}): sharded names {axis!r}. Name an axis of the mesh "
                f"({', '.join(mesh.axis_names)}) that does not shard the batch, as "
                f"{', '.join(axes)} does."
            )
    for axis, at in sharded.items():
        if isinstance(at, bool) or not isinstance(at, int) or at < 1:
            raise ValueError(
                f"per_device({name}): sharded has {axis!r}: {at!r}. Give a dimension of 1 or more; "
                "dimension 0 is the batch's."
            )
        if axis != SEQUENCE and [d for a, d in sharded.items() if a != SEQUENCE].count(at) > 1:
            raise ValueError(
                f"per_device({name}): sharded has dimension {at} twice. Shard a dimension over one "
                "axis."
            )

    @functools.wraps(function)
    def over_rows(*args: PyTree) -> PyTree:
        for i, arg in enumerate(args):
            for path, x in jax.tree_util.tree_leaves_with_path(() if i in replicated else arg):
                if not x.shape or x.shape[0] % n:
                    raise ValueError(
                        f"per_device({name}): argument {i}{jax.tree_util.keystr(path)} has shape "
                        f"{x.shape}, and {n} devices (axes {', '.join(axes)}) do not divide its "
                        f"first dimension. Make it a multiple, or add {i} to replicated."
                    )
                for axis, at in sharded.items():
                    parts = math.prod(mesh.shape[a] for a, d in sharded.items() if d == at)
                    if at < len(x.shape) and x.shape[at] % parts:
                        raise ValueError(
                            f"per_device({name}): argument {i}{jax.tree_util.keystr(path)} has "
                            f"shape {x.shape}, and the {parts} devices of {axis!r} do not divide "
                            f"its dimension {at}. Make it a multiple (repeat the heads of keys), "
                            f"or remove {axis!r} from sharded."
                        )
        in_specs = tuple(
            PartitionSpec() if i in replicated else jax.tree.map(spec, arg)
            for i, arg in enumerate(args)
        )
        # One spec for results of any rank, so that it may be no longer than needed.
        last = max(sharded.values(), default=0)
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=_spec(last + 1, axes, sharded),
            # Other axes stay automatic: XLA shards over them.
            axis_names={*axes, *sharded},
            # With the check, results of a pallas_call must declare the axes that they vary over.
            check_vma=False,
        )
        with _traced_for(mesh):
            return mapped(*args)

    def spec(x: Shaped) -> PartitionSpec:
        return _spec(len(x.shape), axes, sharded)

    return over_rows


def _spec(rank: int, axes: tuple[str, ...], sharded: Mapping[str, int]) -> PartitionSpec:
    """Returns a spec: rows over the axes of the batch, further dimensions according to
    ``sharded``."""
    dimensions: list[Any] = [axes] + [None] * (rank - 1)
    for axis, at in sharded.items():
        if at < rank:
            dimensions[at] = axis if dimensions[at] is None else (dimensions[at], axis)
    return PartitionSpec(*dimensions)


def _traced_for(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Sets an absent device as default, because kernels ask the default device for its kind."""
    devices_exist = are_present(mesh)
    return contextlib.nullcontext() if devices_exist else jax.default_device(mesh.devices.flat[0])
