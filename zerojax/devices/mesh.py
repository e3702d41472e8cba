"""The devices that exist, as the mesh that every spec refers to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

AXIS = "data"


def mesh(devices: int | None = None, axes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh over the devices that exist.

    Args:
      devices: how many of them; all by default.
      axes: axis names and sizes, multiplying to ``devices``; one "data" axis by default.

    Raises:
      ValueError: more devices than there are, or axes that do not multiply out.

    Example:
      >>> import zerojax
      >>> zerojax.mesh().axis_names
      ('data',)
    """
    there = jax.devices()
    if devices is not None and not 0 < devices <= len(there):
        raise ValueError(
            f"{devices} devices asked for, but there are {len(there)} ({there[0].platform}). "
            "Ask for fewer; for virtual CPU devices set "
            "jax.config.update('jax_num_cpu_devices', N) before JAX is first used; for devices "
            "that are not there use zerojax.topology(...)."
        )
    chosen = there[:devices]
    sizes = dict(axes) if axes is not None else {AXIS: len(chosen)}
    if math.prod(sizes.values()) != len(chosen):
        raise ValueError(
            f"axes {sizes} multiply to {math.prod(sizes.values())}, not to the "
            f"{len(chosen)} devices: change the axes or pass devices=."
        )
    return automatic(Mesh(np.array(chosen).reshape(tuple(sizes.values())), tuple(sizes)))


def automatic(given: Mesh) -> Mesh:
    """``given`` with every axis left to XLA, whatever axis types it was made with.

    zerojax places collectives through constraints, which explicit axes do not take.
    """
    return Mesh(
        given.devices, given.axis_names, axis_types=(AxisType.Auto,) * len(given.axis_names)
    )


def explicit_axes(given: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of a mesh that are explicit."""
    pairs = zip(given.axis_names, given.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def explicit_around(given: Mesh) -> tuple[str, ...]:
    """The axes that are explicit under ``jax.set_mesh``, whose mesh is to be this one.

    Raises:
      ValueError: it is another one.
    """
    there = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes(there)
    if explicit and dict(there.shape) != dict(given.shape):
        raise ValueError(
            f"jax.set_mesh has set a mesh {dict(there.shape)} with explicit axes, but zero's is "
            f"{dict(given.shape)}: pass that mesh to zerojax.zero(..., mesh=mesh), or call the "
            "step outside of jax.set_mesh."
        )
    return explicit


@contextlib.contextmanager
def automatic_context(given: Mesh) -> Iterator[tuple[str, ...]]:
    """:func:`explicit_around`; within, those axes are automatic."""
    explicit = explicit_around(given)
    with jax.set_mesh(given) if explicit else contextlib.nullcontext():
        yield explicit


def relabelled(tree: Any, given: Mesh) -> Any:
    """Arrays that lie on the mesh's devices under explicit axes, or others, as lying on it."""

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        sharding = x.sharding
        if (
            not isinstance(sharding, NamedSharding)
            or not isinstance(sharding.mesh, Mesh)
            or sharding.mesh.axis_types == given.axis_types
            or not same_devices(sharding.mesh, given)
        ):
            return x
        return jax.device_put(
            x, NamedSharding(given, sharding.spec, memory_kind=sharding.memory_kind)
        )

    return jax.tree.map(moved, tree)


def shard_axis(given: Mesh) -> str:
    """The axis over which ZeRO shards: "data", or the only one there is."""
    if AXIS in given.axis_names:
        return AXIS
    if len(given.axis_names) == 1:
        return given.axis_names[0]
    raise ValueError(
        f"the mesh has axes {given.axis_names} and none is called {AXIS!r}: ZeRO shards over "
        f"that one. Rename the data-parallel axis to {AXIS!r}."
    )


def same_devices(a: Mesh, b: Mesh) -> bool:
    """Whether two meshes lay the same devices out under the same axis names."""
    return a.axis_names == b.axis_names and np.array_equal(a.devices, b.devices)


def are_there(given: Mesh) -> bool:
    """Whether the mesh's devices exist, and are not only compiled for."""
    return bool(given.devices.flat[0].addressable_memories())
