"""Momenta and gradients in 1 bit an element, with the errors of both quantizations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.reduction import add_up, pin_to_devices
from zerojax.devices.mesh import batch_axes
from zerojax.optim.one_bit import OneBitState, Sending
from zerojax.plan.layout import Spec


class OneBitMomentum:
    r"""The gradients of one update of 1-bit Adam, 1-bit Lamb or 0/1 Adam.

    In the warm-up a gradient is the plain sum. After the warm-up each of :math:`n` devices, with
    the sum :math:`g_i` over its own rows, the momentum :math:`m` and its error :math:`e_i`, sends
    the signs of

    .. math:: c_i = \beta_1 m + (1 - \beta_1) n g_i + e_i

    and the scale :math:`\lVert c_i \rVert / \sqrt{P}`, with :math:`P` elements. Each device
    averages what it receives of one slice, adds the error of that slice, and sends signs and a
    scale again. Together the slices are the new momentum :math:`m'`, and the gradient is the one
    with which the update yields that momentum: :math:`(m' - \beta_1 m) / (1 - \beta_1)`. 0/1 Adam
    also sends gradients in this way, with 0 for :math:`\beta_1`. Where the variance is 0 the
    momentum is set to 0, as signs have no zero. Source: 1-bit Adam, arXiv:2102.02888, and
    DeepSpeed's ``compressed_allreduce``, where the user has to supply an ``exp_avg_mask`` for this.

    Args:
      gatherer: Reduces gradients.
      errors: By parameter, see :func:`zerojax.plan.error_feedback.one_bit_errors`.
      state: The optimizer's state.
      how: The form in which this update's gradients are sent.
      scale: float32 [], the loss scale; None without one.
      key: The config key that asks for 1-bit gradients.

    Attributes:
      after: The errors after the update.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        errors: Sequence[tuple[jax.Array, ...]],
        state: OneBitState,
        how: Sending,
        scale: jax.Array | None,
        key: str,
    ) -> None:
        self._gatherer, self._how, self.key = gatherer, how, key
        self._momenta, self._squares = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
        self._scale = jnp.ones((), jnp.float32) if scale is None else scale
        self._errors = [
            tuple(jnp.where(how.anew, jnp.zeros_like(x), x) for x in each) for each in errors
        ]
        self.after = list(self._errors)

    def reduced(self, parameter: int, parts: jax.Array, spec: Spec) -> jax.Array:
        """Returns a parameter's gradient, float32, from the devices' partial sums
        [devices, *shape]."""
        parts = pin_to_devices(parts.astype(jnp.float32), self._gatherer)
        errors, last = self._errors[parameter][:2], self._errors[parameter][2:]

        def plain(_: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            total = self._gatherer.scatter_parts(add_up(parts, 0), spec)
            return total, (*errors, *map(jnp.zeros_like, last))

        def sent(_: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return self._sent(parameter, parts, spec, errors, last)

        total, self.after[parameter] = lax.cond(self._how.plain, plain, sent, None)
        return total

    def _sent(
        self,
        parameter: int,
        parts: jax.Array,
        spec: Spec,
        errors: Sequence[jax.Array],
        last: Sequence[jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        n, beta, momentum = len(parts), self._how.beta, self._momenta[parameter]
        unsharded = self._unsharded(momentum, last)
        local = beta * unsharded + (1 - beta) * n * (parts / self._scale)
        mean, new_errors, bits = mean_in_one_bit(local.reshape(n, -1), errors, self._gatherer)
        new = self._gatherer.constrain(mean.reshape(momentum.shape), spec)
        new = jnp.where(self._squares[parameter] > 0, new, 0.0)
        gradient = (new - beta * momentum) / (1 - beta) * self._scale
        new_bits = [jnp.where(beta > 0, x, jnp.zeros_like(x)) for x in bits] if last else []
        return self._gatherer.constrain(gradient, spec), (*new_errors, *new_bits)

    def _unsharded(self, momentum: jax.Array, last: Sequence[jax.Array]) -> jax.Array:
        """Returns the unsharded momentum: if it is sharded, decoded from the bits that were sent
        last. It is gathered once, before the first bits are sent."""
        if not last:
            return momentum
        codes, scales = last

        def decoded(_: Any) -> jax.Array:
            x = (unpack(codes) * scales[:, None]).reshape(-1)[: momentum.size]
            return x.reshape(momentum.shape)

        def gathered(_: Any) -> jax.Array:
            return self._gatherer.constrain(momentum, (None,) * momentum.ndim)

        return lax.cond(jnp.any(scales > 0), decoded, gathered, None)


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
