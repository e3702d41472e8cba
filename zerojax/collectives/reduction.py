"""The sum over the devices of their partial sums over rows: a reduce-scatter, or an all-to-all of
quantized shards that are added up on arrival (qgZ of ZeRO++).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.devices.mesh import SEQUENCE, axis_size, batch_axes, joined_axes, sequence_size
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry, SubAxis
from zerojax.plan.quantized import Format, block_of_slice


def axes_of(gatherer: Gatherer) -> list[tuple[str, ...]]:
    """Returns the axes of the mesh that split rows, and those that split tokens, if any."""
    mesh = gatherer.mesh
    return [batch_axes(mesh), *([(SEQUENCE,)] if sequence_size(mesh) > 1 else [])]


def pin_to_devices(value: jax.Array, gatherer: Gatherer) -> jax.Array:
    """Constrains partial sums [devices, ...], each to its device."""
    return gatherer.constrain(value, (sum(axes_of(gatherer), ()), *(None,) * (value.ndim - 1)))


def of_all(parts: jax.Array, spec: Spec, gatherer: Gatherer) -> jax.Array:
    """Returns the sum of the devices' partial sums [devices, *shape], sharded by ``spec``."""
    (at,) = layout.dimensions(spec, gatherer.axis)
    return reduce_partial_sums(
        pin_to_devices(jnp.moveaxis(parts, 1 + at, 1), gatherer), spec, gatherer
    )


def reduce_partial_sums(value: jax.Array, spec: Spec, gatherer: Gatherer) -> jax.Array:
    """Returns the sum of partial sums, sharded by ``spec``: reduce-scattered within each replica
    group, and then all-reduced over the groups.

    If gradients are sent quantized (qgZ), so is a large matrix, which is summed on arrival, in
    float32. The sum runs over one part of the axis at a time, innermost first, so that the fewest
    bytes are sent between hosts.

    Args:
      value: [devices, *shape], each device's partial sum on that device, with the dimension that is
        split first in ``shape``.
      spec: The spec of the sum's shard.
    """
    axis, mesh, axes = gatherer.axis, gatherer.mesh, sum(axes_of(gatherer), ())
    (at,), n = layout.dimensions(spec, axis), axis_size(mesh, axis)
    parts = [name for _, name in layout.parts_of(spec, axis)]  # the innermost first
    how = gatherer.sent.gradients
    block = None if sequence_size(mesh) > 1 else block_of_slice(value.shape[1:], n, how)
    split_order = [name for name in layout.axes(spec[at]) if layout.full_axis(name) == axis]
    if block is not None and parts == [axis] and 1 < gatherer.near < n:
        outer = n // gatherer.near
        split_order = [SubAxis(axis, 1, outer).name, SubAxis(axis, outer, gatherer.near).name]
        parts = split_order[::-1]
    devices = [p for name in axes for p in (reversed(parts) if name == axis else [name])]
    x = value.reshape(*(layout.parts(name, mesh) for name in devices), *value.shape[1:])
    if block is None or how is None:
        x = _scattered(x, devices, parts, gatherer)
    else:
        x = _exchanged(x, devices, parts, split_order, block, how.format, gatherer)
    groups, unsharded = [a for a in axes if a not in joined_axes(axis)], (None,) * (value.ndim - 2)
    if groups:
        shard_spec = tuple(split_order), *unsharded
        aval = jax.ShapeDtypeStruct(value.shape[1:], value.dtype)
        gatherer.ledger.reduces(aval, shard_spec, shard_spec, over=gatherer.replicas)
        x = gatherer.constrain(add_up(x, *range(len(groups))), shard_spec)
    return gatherer.constrain(jnp.moveaxis(x.astype(value.dtype), 0, at), spec)


def _scattered(
    x: jax.Array, devices: list[str], parts: Sequence[str], gatherer: Gatherer
) -> jax.Array:
    """Adds up partial sums [*devices, *shape] over ``parts``, one at a time, and splits the first
    dimension of ``shape`` over each part."""
    cut: tuple[str, ...] = ()
    for name in parts:
        x = add_up(x, *map(devices.index, joined_axes(name)))
        devices = [each for each in devices if each not in joined_axes(name)]
        unsharded = (None,) * (x.ndim - len(devices) - 1)
        x = gatherer.constrain(x, (*devices, cut or None, *unsharded))
        before, cut = cut, (*cut, name)
        aval = jax.ShapeDtypeStruct(x.shape[len(devices) :], x.dtype)
        n, unsharded = layout.parts(name, gatherer.mesh), (None,) * (aval.ndim - 1)
        specs = (before or None, *unsharded), (cut, *unsharded)
        gatherer.ledger.reduces(aval, *specs, over=n)
        # Of a sum over the devices' own dimension, constrained to be split, XLA makes a
        # reduce-scatter.
        x = gatherer.constrain(x, (*devices, cut, *unsharded))
    return x


def _exchanged(
    x: jax.Array,
    devices: list[str],
    parts: Sequence[str],
    split_order: Sequence[str],
    block: Sequence[int],
    form: Format,
    gatherer: Gatherer,
) -> jax.Array:
    """Adds up partial sums like :func:`_scattered`, but sends codes and scales: each device
    dequantizes and adds up the slices of its shard.

    Args:
      x: [*devices, *shape], with the dimension that is split first in ``shape``.
      devices: The axes, or parts of axes, over which the leading dimensions of ``x`` are sharded.
      parts: The parts to sum over, one after the other.
      split_order: The same parts in the order in which they split the dimension, outermost first.
      block: The extent of a block in each dimension of a device's shard.
      form: The format of the codes.
    """
    sizes = [layout.parts(name, gatherer.mesh) for name in split_order]
    shape = x.shape[len(devices) :]
    shard_shape = shape[0] // math.prod(sizes), *shape[1:]
    x = x.reshape(*x.shape[: len(devices)], *sizes, *shard_shape)
    spec: list[SpecEntry] = [*devices, *(None for _ in (*split_order, *shard_shape))]
    for name in parts:
        source = spec.index(name)
        target = len(spec) - len(shard_shape) - len(split_order) + split_order.index(name)
        new_spec = list(spec)
        new_spec[source], new_spec[target] = None, name
        widths = [*(1 for _ in range(x.ndim - len(shard_shape))), *block]
        sent = []
        for y in quantize(gatherer.constrain(x, spec), widths, form):
            y = gatherer.constrain(y, spec)
            gatherer.ledger.exchanges(y, spec, layout.parts(name, gatherer.mesh))
            # XLA makes an all-to-all of a change from one sharded dimension to another: of codes,
            # and of scales.
            sent.append(gatherer.constrain(y, new_spec))
        codes, scales = sent
        x, spec = add_up(dequantize(codes, scales, form, jnp.float32), source), new_spec
        spec.pop(source)
        x = gatherer.constrain(x, spec)
    return x.reshape(*x.shape[: len(spec) - len(shard_shape) - len(split_order)], *shape)


def add_up(x: jax.Array, *dimensions: int) -> jax.Array:
    """Returns the sum over dimensions, in the dtype of ``x``."""
    # jnp.sum adds bfloat16 in float32: XLA then all-reduces gradients, 470 MB for the 117 MB that 8
    # layers of 1024 x 4096 reduce-scatter on 8 H100s.
    return lax.reduce(x, jnp.zeros((), x.dtype), lax.add, dimensions)


def cut_evenly(shape: Sequence[int], spec: Spec, gatherer: Gatherer) -> int | None:
    """Returns the dimension that ``spec`` splits evenly over all devices of the shard axis; None if
    there is no such dimension."""
    axis, mesh = gatherer.axis, gatherer.mesh
    dims, n = layout.dimensions(spec, axis), axis_size(mesh, axis)
    if len(dims) != 1 or layout.parts(spec[dims[0]], mesh) != n or shape[dims[0]] % n:
        return None
    # Sums over a joined axis are over all of its members at once.
    return dims[0] if len(joined_axes(axis)) == 1 or spec[dims[0]] == axis else None


def is_quantized(shape: Sequence[int], spec: Spec, gatherer: Gatherer) -> bool:
    """Returns whether :func:`reduce_partial_sums` sends a gradient quantized."""
    at = cut_evenly(shape, spec, gatherer)
    if at is None or sequence_size(gatherer.mesh) > 1:
        return False
    moved = shape[at], *shape[:at], *shape[at + 1 :]
    n = axis_size(gatherer.mesh, gatherer.axis)
    return block_of_slice(moved, n, gatherer.sent.gradients) is not None
