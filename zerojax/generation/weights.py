"""The placement of a model's parameters while it generates.

Every token needs every parameter once. The parameters are gathered once and stay on each device
("gathered"); or they stay at rest, sharded or in host memory, and each layer is gathered or copied
in every token ("by_layer"; from host memory this is ZeRO-Inference, arXiv:2207.00032).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from zerojax.collectives import Inserter, Shard, gather_once
from zerojax.collectives.gathering import Thresholds
from zerojax.collectives.shard import Gathering
from zerojax.devices.mesh import SEQUENCE, batch_axes, zero_axis
from zerojax.distributed import log
from zerojax.foresight.devices import rates_here
from zerojax.generation.layers import Layered, Stacks
from zerojax.offload.disk.array import DiskArray
from zerojax.plan import layout
from zerojax.plan.places import DEVICE, PINNED
from zerojax.plan.table import size
from zerojax.xla import jaxprs
from zerojax.xla.types import PyTree

Weights = Literal["gathered", "by_layer"]

ROOM = 0.7
"""The share of a device's free memory that gathered parameters and the cache may take."""


class Storage(NamedTuple):
    """The places of parameters and cache; hashable.

    Attributes:
      mesh: The devices; None for parameters that are on no mesh.
      shards: The sharding of each parameter that is gathered or copied where it is used, None for
        the others; empty if the parameters are gathered.
      structure: `jax.tree.structure` of the parameters.
      cache_layers: For each array of the cache the number of layers that are unstacked, and run one
        after another; 0 for another array, and if a loop copies the layers of the parameters from
        host memory.
    """

    mesh: Mesh | AbstractMesh | None
    shards: tuple[NamedSharding | None, ...]
    structure: PyTreeDef
    cache_layers: tuple[int, ...]

    @property
    def on_host(self) -> bool:
        """True if some of the parameters are in host memory."""
        return any(s is not None and s.memory_kind == PINNED for s in self.shards)


def mesh_of(arrays: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """Returns the mesh on which arrays are placed; None for arrays that are on no mesh."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next(meshes, None)


def shapes(params: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Returns the shapes of parameters, and their dtypes after the cast to `dtype`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _dtype(x, dtype)), params)


def place(
    params: PyTree,
    weights: Weights | None,
    dtype: DTypeLike | None,
    cache_bytes: int,
    stacks: Stacks,
    devices: Mesh | None = None,
) -> tuple[Layered, Storage]:
    """Places parameters for generation, and logs how. Gathered stacks are unstacked.

    Args:
      params: The parameters, on the devices of a mesh or of one, in host memory, or on disk.
      weights: "gathered" or "by_layer"; None for gathered parameters if they fit.
      dtype: The dtype of floating parameters; None for their own.
      cache_bytes: The bytes of the cache on each device.
      stacks: The stacks of layers among the parameters, and the arrays of the cache.
      devices: The devices, if they are absent, so that the parameters may be on an abstract mesh.
    """
    leaves, structure = jax.tree.flatten(params)
    arrays = [_plain(x, dtype) for x in leaves]
    mesh = mesh_of(arrays) or devices
    gathered_bytes = sum(_gathered_bytes(x) for x in arrays)
    is_at_rest = any(_is_shard(x) for x in arrays)
    if weights is None:
        free = free_bytes(devices or (mesh if isinstance(mesh, Mesh) else None))
        fits = free is None or gathered_bytes + cache_bytes <= ROOM * free
        weights = "gathered" if fits or not is_at_rest else "by_layer"
    if is_at_rest:
        ways = {
            "gathered": f"are gathered once, {size(gathered_bytes)} on each device",
            "by_layer": "stay at rest, and each layer reads them in every token",
        }
        log.info("generate: the parameters %s.", ways[weights])
    if weights == "gathered":
        gathered = [*map(_gathered, arrays, stacks.params)]
        return gathered, Storage(mesh, (), structure, stacks.cache)
    shards = tuple(x.sharding if _is_shard(x) else None for x in arrays)
    storage = Storage(mesh, shards, structure, stacks.cache)
    layers = (0,) * len(stacks.cache) if storage.on_host else stacks.cache
    return arrays, storage._replace(cache_layers=layers)


def entered(
    arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding | None], inserter: Inserter
) -> list[Any]:
    """Returns parameters, within a traced program, in the form that an inserter takes."""
    values = [
        x
        if sharding is None
        else Shard(
            x,
            layout.full(sharding.spec, x.ndim),
            gathering=Gathering(host=sharding.memory_kind == PINNED),
        )
        for x, sharding in zip(arrays, shardings, strict=True)
    ]
    return gather_once.gather(values, gather_once.by_plan(values, inserter), inserter)


def _plain(x: Any, dtype: DTypeLike | None) -> Any:
    """Returns a leaf of the parameters as an array that JAX can shard, in the dtype."""
    if isinstance(x, DiskArray):
        x = x.load()
    if not isinstance(x, jax.ShapeDtypeStruct):
        x = jnp.asarray(x)
    dtype = _dtype(x, dtype)
    if x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    on_device = x.sharding.with_memory_kind(DEVICE) if _is_on_host(x) else x.sharding
    cast = jax.device_put(x, on_device).astype(dtype)
    return jax.device_put(cast, x.sharding)


def _dtype(x: Any, dtype: DTypeLike | None) -> DTypeLike:
    """Returns the dtype of an array after the cast of floating parameters to `dtype`."""
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.dtype  # type: ignore[no-any-return]
    return dtype


def _is_on_host(x: Any) -> bool:
    return getattr(x.sharding, "memory_kind", None) == PINNED


def _is_shard(x: Any) -> bool:
    """Returns whether a use must gather an array over ZeRO's axes, or copy it to the device."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return False
    return _is_on_host(x) or _target(sharding, x.ndim) != layout.full(sharding.spec, x.ndim)


def _target(sharding: NamedSharding, ndim: int) -> layout.Spec:
    """Returns the spec of a gathered array: without the axes that shard rows and tokens."""
    spec = layout.full(sharding.spec, ndim)
    if sharding.mesh.size == 1:
        return spec
    for axis in (*batch_axes(sharding.mesh), SEQUENCE):
        spec = layout.without(spec, axis)
    return spec


def _gathered_bytes(x: Any) -> int:
    spec = _target(x.sharding, x.ndim) if isinstance(x.sharding, NamedSharding) else None
    return device_bytes(x, spec)


def device_bytes(x: Any, spec: layout.Spec | None) -> int:
    """Returns the bytes of a device's shard under `spec`; of the array without one."""
    shape = x.shape if spec is None else layout.shard_shape(x.shape, spec, x.sharding.mesh)
    return math.prod(shape) * jaxprs.bits(x.dtype) // 8


def free_bytes(devices: Mesh | None) -> int | None:
    """Returns the free bytes of a device; None if unknown, as for CPUs."""
    if devices is None or devices.devices.flat[0].platform == "cpu":
        return None
    return rates_here(devices).memory


def _gathered(x: Any, layers: int) -> Any:
    """Returns an array on the devices, gathered over the axes that shard rows and tokens; a tuple
    of layers for a stack."""
    is_abstract, target = isinstance(x, jax.ShapeDtypeStruct), x.sharding
    if _is_on_host(x):
        target = target.with_memory_kind(DEVICE)
        x = x if is_abstract else jax.device_put(x, target)
    if isinstance(target, NamedSharding):
        spec = _target(target, x.ndim)
        target = NamedSharding(target.mesh, PartitionSpec(*spec[bool(layers) :]))
    if is_abstract:
        array = jax.ShapeDtypeStruct(x.shape[bool(layers) :], x.dtype, sharding=target)
        return (array,) * layers if layers else array
    return _unstack(layers, target)(x) if layers else jax.device_put(x, target)


@functools.lru_cache(maxsize=64)
def _unstack(layers: int, target: Sharding) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """Returns a function that returns the layers of a stack, each with the sharding `target`."""
    return jax.jit(lambda x: tuple(x[i] for i in range(layers)), out_shardings=target)


def inserter_of(mesh: Any) -> Inserter:
    """Returns an inserter that gathers each parameter where it is used."""
    return Inserter(mesh, zero_axis(mesh), keep=False, share=True, thresholds=Thresholds(held=0))
