"""The mean of the devices' arrays, sent in 1 bit an element, with the errors of both messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.reduction import add_up
from zerojax.devices.mesh import batch_axes


def mean_in_one_bit(
    local: jax.Array, errors: Sequence[jax.Array], gatherer: Gatherer
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the mean of the devices' rows of ``local``, the new errors, and the mean as it was
    sent: uint8 [devices, size / devices / 8] and float32 [devices].

    Args:
      local: float32 [devices, size], each device's row on that device.
      errors: The errors of the rows that devices send, [devices, size], and of the slice that each
        device averages, [devices, size / devices]; padded with zeros to full bytes per slice.
      gatherer: Constrains arrays to the devices.
    """
    axes, constrain = batch_axes(gatherer.mesh), gatherer.constrain
    n, size = local.shape
    slice_size = errors[1].shape[1]
    padding = n * slice_size - size
    is_element = (jnp.arange(n * slice_size) < size).reshape(n, slice_size)

    corrected = jnp.pad(local, ((0, 0), (0, padding))) + errors[0]
    corrected = constrain(corrected, (axes, None))
    scales = jnp.linalg.norm(corrected, axis=1) / math.sqrt(size)
    sent_errors = jnp.where(
        is_element.reshape(-1), corrected - scales[:, None] * signs(corrected), 0.0
    )
    codes = constrain(pack(corrected.reshape(n, n, slice_size)), (axes, None, None))
    codes = constrain(codes, (None, axes, None))
    scales = constrain(constrain(scales, (axes,)), (None,))
    own_slice = add_up(unpack(codes) * scales[:, None, None], 0) / n + errors[1]

    own_slice = constrain(jnp.where(is_element, own_slice, 0.0), (axes, None))
    elements = jnp.maximum(is_element.sum(1), 1).astype(own_slice.dtype)
    scales = jnp.linalg.norm(own_slice, axis=1) / jnp.sqrt(elements)
    mean_errors = constrain(
        jnp.where(is_element, own_slice - scales[:, None] * signs(own_slice), 0.0), (axes, None)
    )
    codes = constrain(constrain(pack(own_slice), (axes, None)), (None, None))
    scales = constrain(constrain(scales, (axes,)), (None,))
    mean = (unpack(codes) * scales[:, None]).reshape(-1)[:size]
    return mean, (constrain(sent_errors, (axes, None)), mean_errors), (codes, scales)


def signs(x: jax.Array) -> jax.Array:
    """Returns 1 or -1 for each element; 1 for 0."""
    return jnp.where(x >= 0, 1.0, -1.0)


def pack(x: jax.Array) -> jax.Array:
    """Packs the signs of [..., 8 n] into bits, uint8 [..., n]."""
    bits = (x >= 0).reshape(*x.shape[:-1], -1, 8).astype(jnp.uint8)
    return jnp.sum(bits << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def unpack(codes: jax.Array) -> jax.Array:
    """Unpacks bits, uint8 [..., n], into 1 or -1, float32 [..., 8 n]."""
    bits = (codes[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return (2.0 * bits.astype(jnp.float32) - 1.0).reshape(*codes.shape[:-1], -1)
