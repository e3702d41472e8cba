"""The errors of quantized gradients that devices keep from update to update (LoCo, 1-bit Adam).

Each device keeps what its own quantization left out, so that an error is of the whole gradient and
differs from device to device. Where a gradient is sent twice, within a host and between hosts, the
second quantization has an error as well, of what a device sums up within its host.
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
from zerojax.plan.quantized import block_of_piece, sent
from zerojax.plan.rule import SMALL
from zerojax.plan.table import size

KEY = "zero_optimization.zeropp_loco_param"


def errors_of(
    config: ZeroConfig, leaves: Sequence[Leaf], mesh: Mesh, axis: str
) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    """The errors of each parameter's gradient, one for each time that the gradient is sent; none
    for a gradient that is not sent quantized.

    An error is float32, [devices, *shape] with the dimension in front that is cut.

    Raises:
      ConfigError: The mesh has an axis over which the batch is not divided.
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
    """The key that has errors kept; None where none has."""
    if config.zeropp_loco_param is not None:
        return KEY
    if config.optimizer is None or config.optimizer.type not in ONE_BIT:
        return None
    return f'optimizer.type = "{config.optimizer.type}"'


def one_bit_errors(leaf: Leaf, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The errors of a momentum that is sent in 1 bit an element: of what each device sends,
    [devices, size], and of the piece that each averages, [devices, size / devices]. ``size`` is
    that of the parameter, up to whole bytes; a small parameter has none.

    Of a sharded one (stage 1) there is also what was sent last, bits as uint8 [devices, size /
    devices / 8] and scales [devices], the same on all devices.
    """
    count, n = math.prod(leaf.shape), mesh.size
    if count <= SMALL or n == 1:
        return ()
    piece = -(-count // (8 * n)) * 8
    errors = (jax.ShapeDtypeStruct((n, k), jnp.float32) for k in (n * piece, piece))
    if not leaf.sharded:
        return tuple(errors)
    bits = jax.ShapeDtypeStruct((n, piece // 8), jnp.uint8)
    return (*errors, bits, jax.ShapeDtypeStruct((n,), jnp.float32))


def _errors(
    config: ZeroConfig, leaf: Leaf, mesh: Mesh, axis: str
) -> Iterator[jax.ShapeDtypeStruct]:
    spec, n = layout.full(leaf.spec, len(leaf.shape)), axis_size(mesh, axis)
    cut = layout.dimensions(spec, axis)
    if len(cut) != 1 or layout.parts(spec[cut[0]], mesh) != n or n == 1:
        return
    (at,) = cut
    extent, others = leaf.shape[at], (*leaf.shape[:at], *leaf.shape[at + 1 :])
    if extent % n or block_of_piece((extent, *others), n, sent(config).gradients) is None:
        return
    for parts in sends(spec, mesh, axis):
        yield jax.ShapeDtypeStruct((mesh.size, extent, *others), jnp.float32)
        extent //= parts


def sends(spec: Spec, mesh: Mesh, axis: str) -> list[int]:
    """The devices among which a gradient is exchanged, each time that it is sent quantized."""
    parts = [layout.parts(name, mesh) for _, name in layout.parts_of(spec, axis)]
    n, close = axis_size(mesh, axis), near(mesh, axis)
    return [close, n // close] if len(parts) == 1 and 1 < close < n else parts


def error_spec(mesh: Mesh, ndim: int) -> Spec:
    """The spec of an error: each device has its own."""
    return layout.cutting((batch_axes(mesh), *(None,) * (ndim - 1)), mesh)


def error_leaf(path: str, x: Any, mesh: Mesh) -> Leaf:
    """How an error lies at rest, and what was sent last in 1 bit."""
    whole = (None,) * len(x.shape)
    if x.dtype == jnp.uint8 or len(x.shape) == 1:
        return Leaf.of(path, x, whole, whole, "is what all devices were sent", mesh)
    return Leaf.of(path, x, error_spec(mesh, len(x.shape)), whole, "", mesh)


def notes(config: ZeroConfig, errors: Sequence[Leaf], gradients: Sequence[Leaf]) -> Iterator[str]:
    """What error feedback costs, in a sentence.

    Args:
      config: What the plan is made for.
      errors: The errors.
      gradients: As they are accumulated.
    """
    if (key := key_of(config)) is None:
        return
    if not errors:
        yield f"{key}: no gradient is sent quantized, so that there is no error to feed back"
        return
    held = sum(leaf.bytes_per_device for leaf in errors)
    whole = sum(math.prod(leaf.shape) * 4 for leaf in gradients)
    yield (
        f"{key}: each device holds the errors of its own gradients, {size(held)}, and whole "
        f"gradients until the update, {size(whole)}"
    )
