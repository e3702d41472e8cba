"""The errors of quantized gradients that devices keep from update to update (LoCo, 1-bit Adam).

Each device keeps the error of its own quantization, so that an error has the shape of the unsharded
gradient and differs from device to device. If a gradient is sent twice, within a host and between
hosts, the second quantization also has an error, in the sum that a device receives within its host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.config import ConfigError, ZeroConfig
from zerojax.config.keys.named_types import ONE_BIT
from zerojax.devices.mesh import axis_size, batch_axes, batch_devices
from zerojax.devices.network import near
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.quantized import block_of_slice, sent_formats
from zerojax.plan.rule import SMALL
from zerojax.plan.table import size

KEY = "zero_optimization.zeropp_loco_param"


def errors_of(
    config: ZeroConfig, leaves: Sequence[Leaf], mesh: Mesh, axis: str
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the errors of each parameter's gradient, one for each time that the gradient is sent;
    none for a gradient that is not sent quantized.

    An error of LoCo is float32 [devices, *shape], with the sharded dimension first in ``shape``.

    Raises:
      ConfigError: The mesh has an axis over which the batch is not split.
    """
    if (key := key_of(config)) is None:
        return [()] * len(leaves)
    if batch_devices(mesh) != mesh.size:
        others = {a: n for a, n in mesh.shape.items() if a not in batch_axes(mesh) and n > 1}
        raise ConfigError(
            f"{key}: the axes {others} of the mesh divide no rows of the batch, and error feedback "
            "has each device sum up rows of its own; take the key or these axes out"
        )
    if config.zeropp_loco_param is None:
        return [one_bit_errors(leaf, mesh) for leaf in leaves]
    return [tuple(_errors(config, leaf, mesh, axis)) for leaf in leaves]


def key_of(config: ZeroConfig) -> str | None:
    """Returns the config key that asks for error feedback; None if none does."""
    if config.zeropp_loco_param is not None:
        return KEY
    if config.optimizer is None or config.optimizer.type not in ONE_BIT:
        return None
    return f'optimizer.type = "{config.optimizer.type}"'


def one_bit_errors(leaf: Leaf, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the errors of a momentum that is sent in 1 bit an element.

    They are float32 [devices, size], the error in what each device sends, and float32 [devices,
    size / devices], the error in the shard that each device averages. ``size`` is that of the
    parameter, padded so that shards are full bytes; a small parameter has no errors.

    A sharded momentum (stage 1) also has the message that was sent last, the same on all devices:
    bits as uint8 [devices, size / devices / 8], and scales as float32 [devices].
    """
    count, n = math.prod(leaf.shape), mesh.size
    if count <= SMALL or n == 1:
        return ()
    shard_size = -(-count // (8 * n)) * 8
    errors = (jax.ShapeDtypeStruct((n, k), jnp.float32) for k in (n * shard_size, shard_size))
    if not leaf.sharded:
        return tuple(errors)
    bits = jax.ShapeDtypeStruct((n, shard_size // 8), jnp.uint8)
    return (*errors, bits, jax.ShapeDtypeStruct((n,), jnp.float32))


def _errors(
    config: ZeroConfig, leaf: Leaf, mesh: Mesh, axis: str
) -> Iterator[jax.ShapeDtypeStruct]:
    spec, n = layout.full(leaf.spec, len(leaf.shape)), axis_size(mesh, axis)
    dims = layout.dimensions(spec, axis)
    if len(dims) != 1 or layout.parts(spec[dims[0]], mesh) != n or n == 1:
        return
    (dim,) = dims
    extent, others = leaf.shape[dim], (*leaf.shape[:dim], *leaf.shape[dim + 1 :])
    if extent % n or block_of_slice((extent, *others), n, sent_formats(config).gradients) is None:
        return
    for parts in sends(spec, mesh, axis):
        yield jax.ShapeDtypeStruct((mesh.size, extent, *others), jnp.float32)
        extent //= parts


def sends(spec: Spec, mesh: Mesh, axis: str) -> list[int]:
    """Returns the number of devices in each exchange in which a gradient is sent quantized."""
    parts = [layout.parts(name, mesh) for _, name in layout.parts_of(spec, axis)]
    n, close = axis_size(mesh, axis), near(mesh, axis)
    return [close, n // close] if len(parts) == 1 and 1 < close < n else parts


def error_spec(mesh: Mesh, ndim: int) -> Spec:
    """Returns the spec of an error: each device stores the error of its own gradient."""
    return layout.cutting((batch_axes(mesh), *(None,) * (ndim - 1)), mesh)


def error_leaf(path: str, x: Any, mesh: Mesh) -> Leaf:
    """Builds the leaf of an error, or of the 1-bit message that was sent last."""
    replicated = (None,) * len(x.shape)
    if x.dtype == jnp.uint8 or len(x.shape) == 1:
        return Leaf.of(path, x, replicated, replicated, "is what all devices were sent", mesh)
    return Leaf.of(path, x, error_spec(mesh, len(x.shape)), replicated, "", mesh)


def notes(config: ZeroConfig, errors: Sequence[Leaf], gradients: Sequence[Leaf]) -> Iterator[str]:
    """Yields a sentence on the memory cost of error feedback.

    Args:
      config: The config of the plan.
      errors: The leaves of the errors.
      gradients: The leaves of the gradients, as they are accumulated.
    """
    if (key := key_of(config)) is None:
        return
    if not errors:
        yield f"{key}: no gradient is sent quantized, so that there is no error to feed back"
        return
    error_bytes = sum(leaf.bytes_per_device for leaf in errors)
    gradient_bytes = sum(math.prod(leaf.shape) * 4 for leaf in gradients)
    yield (
        f"{key}: each device holds the errors of its own gradients, {size(error_bytes)}, and "
        f"unsharded gradients until the update, {size(gradient_bytes)}"
    )
