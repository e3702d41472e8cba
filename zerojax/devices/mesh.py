"""Creation of meshes over existing devices, and the roles of the axes of any mesh.

The shard axis ("data", or the only axis) shards rows and ZeRO's state; "replica" separates groups
that each have a copy of the state; "seq" shards tokens, and the state together with the shard
axis; "stage" shards the layers of a loop, which runs as a pipeline, and rows outside of it. Other
axes shard the model by the user's own specs.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from zerojax.xla.types import PyTree

AXIS = "data"
REPLICA = "replica"
SEQUENCE = "seq"
STAGE = "stage"

_SEPARATOR = "+"

_LIKE_REPLICA = re.compile(r"replica|^dcn|^(dp|ddp|hsdp|mics)$", re.IGNORECASE)
"""Names that other libraries give the axis between replica groups."""


def mesh(
    devices: int | None = None,
    axes: Mapping[str, int] | str | None = None,
    *,
    replicas: int | Literal["hosts"] | None = None,
) -> Mesh:
    """Creates a mesh over the devices that exist.

    Args:
      devices: number of devices; all by default.
      axes: axis names and sizes, whose product is ``devices``, or the same as text,
        ``"data=4,model=2"``; one "data" axis by default.
      replicas: in place of ``axes``, the number of replica groups, on the axis "replica" outside
        of "data": a group consists of neighbouring devices. "hosts" uses each host, or each slice
        of TPUs, as a group.

    Raises:
      ValueError: more devices than exist, axes that do not multiply out, replicas that do not
        divide the devices, or both replicas and axes.

    Example:
      >>> import zerojax
      >>> zerojax.mesh().axis_names
      ('data',)
      >>> dict(zerojax.mesh(replicas=2).shape)
      {'replica': 2, 'data': 4}
    """
    existing = jax.devices()
    if devices is not None and not isinstance(devices, int | np.integer):
        raise TypeError(
            f'devices={devices!r:.60}: pass a number, zerojax.mesh(8), or axes="data=4,model=2"'
        )
    if devices is not None and not 0 < devices <= len(existing):
        raise ValueError(
            f"{devices} devices asked for, but there are {len(existing)} ({existing[0].platform}). "
            "Pass fewer; for virtual CPU devices set jax.config.update('jax_num_cpu_devices', N) "
            "before JAX is first used; for absent devices use zerojax.topology(...)."
        )
    chosen = existing[:devices]
    hosts = {getattr(device, "slice_index", device.process_index) for device in chosen}
    sizes = axis_sizes(len(chosen), axes, replicas, len(hosts))
    return automatic(Mesh(np.array(chosen).reshape(tuple(sizes.values())), tuple(sizes)))


def parse_axes(text: str) -> dict[str, int]:
    """Parses axis names and sizes, outermost first.

    Raises:
      ValueError: The text has another form.

    >>> parse_axes("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    form = re.compile(r"\s*([A-Za-z]\w*)\s*=\s*([1-9]\d*)\s*")
    pairs = [form.fullmatch(part) for part in text.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(sizes) < len(pairs):
        raise ValueError(f'axes {text!r}: give each axis once, with a size: "data=4,model=2"')
    return sizes


def laid_out(given: Mesh, axes: Mapping[str, int] | str) -> Mesh:
    """Arranges the devices of a mesh, in their order, on other axes.

    Raises:
      ValueError: The axes do not multiply out to the devices.
    """
    sizes = axis_sizes(given.size, axes, None, 1)
    return automatic(Mesh(given.devices.reshape(tuple(sizes.values())), tuple(sizes)))


def axis_sizes(
    devices: int, axes: Mapping[str, int] | str | None, replicas: int | str | None, hosts: int
) -> dict[str, int]:
    """Returns the axis sizes by name, outermost first, of a mesh over ``devices`` on this number of
    ``hosts``; for the other arguments see :func:`mesh`.

    Raises:
      ValueError: the sizes do not multiply to ``devices``, or both axes and replicas are passed.
    """
    if replicas is not None:
        replicas = hosts if replicas == "hosts" else replicas
        if axes is not None:
            raise ValueError(
                f"replicas={replicas!r} and axes={axes!r} are both given: pass one, such as "
                f"axes={{{REPLICA!r}: ..., {AXIS!r}: ...}}."
            )
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ValueError(
                f'replicas={replicas!r}: pass a number of replica groups, or "hosts" for one a host'
            )
        if devices % replicas:
            fits = [n for n in range(1, devices + 1) if devices % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - replicas))[:2])
            raise ValueError(
                f"replicas={replicas} does not divide {devices} devices: pass "
                f"{' or '.join(map(str, near))}"
            )
        return {REPLICA: replicas, AXIS: devices // replicas}
    axes = parse_axes(axes) if isinstance(axes, str) else axes
    if axes is not None and not isinstance(axes, Mapping):
        raise TypeError(f'axes={axes!r:.60}: pass "data=4,model=2" or {{"data": 4, "model": 2}}')
    sizes = {AXIS: devices} if axes is None else dict(axes)
    product = math.prod(sizes.values())
    if product != devices or any(size < 1 for size in sizes.values()):
        written = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"axes {written or '{}'} multiply out to {product}, not to {devices} devices: change a "
            "size"
        )
    return sizes


def automatic(given: Mesh) -> Mesh:
    """Returns ``given`` with automatic axes only, whatever its axis types are.

    zerojax places collectives through sharding constraints, which explicit axes do not accept.
    """
    return Mesh(
        given.devices, given.axis_names, axis_types=(AxisType.Auto,) * len(given.axis_names)
    )


def explicit_axes(given: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's explicit axes."""
    pairs = zip(given.axis_names, given.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def explicit_around(given: Mesh) -> tuple[str, ...]:
    """Returns the axes that are explicit under ``jax.set_mesh``, whose mesh must be ``given``.

    Raises:
      ValueError: ``jax.set_mesh`` has set a mesh of other axes or sizes.
    """
    context = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes(context)
    if explicit and dict(context.shape) != dict(given.shape):
        raise ValueError(
            f"jax.set_mesh has set {dict(context.shape)} with explicit axes, and zero's mesh is "
            f"{dict(given.shape)}: pass that mesh to zerojax.zero(..., mesh=mesh), or call the "
            "step outside jax.set_mesh."
        )
    return explicit


def automatic_context(given: Mesh) -> contextlib.AbstractContextManager[tuple[str, ...]]:
    """Returns a context with the axes of :func:`explicit_around`. In the context these axes are
    automatic, and ``jax.jit`` compiles: under ``jax.disable_jit`` no array would get its sharding.
    """
    explicit, config = explicit_around(given), cast(Any, jax.config)
    if not explicit and not config.jax_disable_jit:
        return contextlib.nullcontext(())
    return _automatic_context(given, explicit)


@contextlib.contextmanager
def _automatic_context(given: Mesh, explicit: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    config: Any = jax.config
    compiled = jax.disable_jit(False) if config.jax_disable_jit else contextlib.nullcontext()
    with compiled, jax.set_mesh(given) if explicit else contextlib.nullcontext():
        yield explicit


def relabel_arrays(tree: PyTree, given: Mesh) -> PyTree:
    """Moves arrays on the same devices, but with other axis types, to the mesh ``given``."""

    def moved(x: object) -> object:
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


def shard_axis(given: Mesh | AbstractMesh) -> str:
    """Returns the axis over which ZeRO shards: "data", or the only axis of the mesh, unless that is
    "replica", "seq" or "stage".

    Raises:
      ValueError: no axis has that name, or one of several seems to be a replica axis by another
        name.
    """
    names = given.axis_names
    if len(names) == 1 and names[0] not in (REPLICA, SEQUENCE, STAGE):
        return cast(str, names[0])
    if mistaken := [name for name in names if name != REPLICA and _LIKE_REPLICA.search(name)]:
        raise ValueError(
            f"the mesh {names} would replicate the batch over {mistaken[0]!r}, an axis that "
            f"zerojax does not know. Name the axis of the batch {AXIS!r}, the axis of replica "
            f"groups {REPLICA!r}, and any other axis by what it shards, such as 'model'."
        )
    if AXIS in names:
        return AXIS
    raise ValueError(
        f"ZeRO shards over the mesh axis {AXIS!r}, and this mesh has {names}. Rename the "
        f"data-parallel axis to {AXIS!r}, or add it: axes={ {AXIS: 1} | dict(given.shape) }"
    )


def zero_axis(given: Mesh | AbstractMesh) -> str:
    """Returns the axis over which ZeRO shards, as zerojax's specs name it: :func:`shard_axis`, or
    "data+seq" for that axis joined with "seq", the tokens innermost."""
    axis = shard_axis(given)
    return f"{axis}{_SEPARATOR}{SEQUENCE}" if sequence_size(given) > 1 else axis


def joined_axes(axis: str) -> tuple[str, ...]:
    """Returns the mesh axes behind an axis of :func:`zero_axis`, outermost first."""
    row_axis = axis.removesuffix(f"{_SEPARATOR}{SEQUENCE}")
    return (axis,) if row_axis == axis else (row_axis, SEQUENCE)


def axis_size(given: Mesh | AbstractMesh, axis: str) -> int:
    """Returns the number of devices along an axis of :func:`zero_axis`."""
    return math.prod(given.shape[name] for name in joined_axes(axis))


def sequence_size(given: Mesh | AbstractMesh) -> int:
    """Returns the number of devices that share the tokens of a row: the size of "seq", or 1."""
    return cast(int, given.shape.get(SEQUENCE, 1))


def nearest_multiples(size: int, n: int) -> str:
    """Names the multiples of ``n`` around a ``size`` that ``n`` does not divide, for a message.

    >>> nearest_multiples(10, 4), nearest_multiples(3, 4)
    ('8 or 12', '4')
    """
    below = size - size % n
    return f"{below} or {below + n}" if below else str(n)


def batch_axes(given: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that shard the rows of a batch, in the mesh's order: the shard axis, and
    "replica" and "stage" if the mesh has these axes."""
    axis = shard_axis(given)
    return tuple(name for name in given.axis_names if name in (REPLICA, STAGE, axis))


def batch_devices(given: Mesh | AbstractMesh) -> int:
    """Returns the number of devices that share the rows of a batch."""
    return math.prod(given.shape[name] for name in batch_axes(given))


def stage_size(given: Mesh | AbstractMesh) -> int:
    """Returns the number of pipeline stages: the size of "stage", or 1."""
    return cast(int, given.shape.get(STAGE, 1))


def micro_batch_devices(given: Mesh | AbstractMesh) -> int:
    """Returns the number of devices that share the rows of a micro-batch: those of one stage."""
    return batch_devices(given) // stage_size(given)


def same_devices(a: Mesh, b: Mesh) -> bool:
    """Returns whether two meshes have the same device array and axis names."""
    return a.axis_names == b.axis_names and np.array_equal(a.devices, b.devices)


def are_present(given: Mesh) -> bool:
    """Returns whether the mesh's devices exist, unlike those of a topology."""
    return bool(given.devices.flat[0].addressable_memories())
