"""Error feedback: a device adds the error of quantizing its gradient to its next gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.collectives.reduction import pin_to_devices, reduce_partial_sums
from zerojax.config.keys.loco import Loco
from zerojax.devices.mesh import batch_axes
from zerojax.plan import layout
from zerojax.plan.error_feedback import KEY
from zerojax.plan.layout import Spec


class ErrorFeedback:
    r"""The errors of one update's gradients.

    With the device's own gradient :math:`g`, the error :math:`e` and the codes
    :math:`Q(\cdot)`, each device sends :math:`Q(g + e)` and keeps

    .. math:: e \leftarrow \beta e + (1 - \beta) (g + e - Q(g + e))

    which is zero again every ``reset_T`` updates. Source: LoCo, arXiv:2407.04480, and DeepSpeed's
    ``loco_swizzle_quant`` and ``loco_quantized_reduction``. DeepSpeed feeds errors back in each
    micro-batch and keeps them in 8 bits; zerojax does so once an update and in float32.

    Args:
      loco: Beta and the period.
      gatherer: Reduces gradients.
      errors: By parameter, see :mod:`zerojax.plan.error_feedback`.
      updates: int [], the number of updates so far.
      scale: float32 [], the loss scale of the gradients, which errors are stored without; None
        without one.

    Attributes:
      key: The config key that asks for error feedback.
      after: The errors after the update; unchanged for a gradient that is not sent.
    """

    key = KEY

    def __init__(
        self,
        loco: Loco,
        gatherer: Gatherer,
        errors: Sequence[tuple[jax.Array, ...]],
        updates: jax.Array,
        scale: jax.Array | None,
    ) -> None:
        self._beta, self._gatherer = loco.err_beta, gatherer
        self._scale = jnp.ones((), jnp.float32) if scale is None else scale
        self._ends = (updates + 1) % loco.reset_T == 0
        self._errors, self.after = list(errors), list(errors)

    def reduced(self, parameter: int, parts: jax.Array, spec: Spec) -> jax.Array:
        """Returns the sum of the devices' partial sums [devices, *shape] of a parameter's gradient,
        sharded by ``spec``, float32."""
        (at,) = layout.dimensions(spec, self._gatherer.axis)
        value = pin_to_devices(jnp.moveaxis(parts.astype(jnp.float32), 1 + at, 1), self._gatherer)
        old_errors, new_errors = iter(self._errors[parameter]), []

        def feed_back(x: jax.Array, x_spec: Sequence[Any], block: Sequence[int]) -> jax.Array:
            old = self._as_sent(next(old_errors), x.shape, x_spec)
            corrected = x + old * self._scale
            new = self._beta * old + (1 - self._beta) * self._lost(corrected, x_spec, block)
            stored = self._at_rest(new, x_spec, value.ndim)
            new_errors.append(jnp.where(self._ends, jnp.zeros_like(stored), stored))
            return corrected

        total = reduce_partial_sums(value, spec, self._gatherer, feed_back)
        self.after[parameter] = tuple(new_errors)
        return total

    def _lost(self, x: jax.Array, spec: Sequence[Any], block: Sequence[int]) -> jax.Array:
        """Returns the error of quantizing ``x``, without the loss scale."""
        assert self._gatherer.sent.gradients is not None
        form = self._gatherer.sent.gradients.format
        widths = [*(1 for _ in range(x.ndim - len(block))), *block]
        sent = dequantize(*quantize(self._gatherer.constrain(x, spec), widths, form), form, x.dtype)
        return self._gatherer.constrain(x - sent, spec) / self._scale

    def _as_sent(self, error: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> jax.Array:
        """Returns an error in the shape and spec of the gradient that is sent."""
        order = self._devices_first(spec)
        x = error.reshape([shape[d] for d in order])
        x = self._gatherer.constrain(x, [spec[d] for d in order])
        return self._gatherer.constrain(x.transpose([order.index(d) for d in range(x.ndim)]), spec)

    def _at_rest(self, x: jax.Array, spec: Sequence[Any], ndim: int) -> jax.Array:
        """Returns an error in the form in which it is stored: [devices, ...], with ``ndim``
        dimensions; the reverse of :meth:`_as_sent`."""
        order = self._devices_first(spec)
        x = lax.reshape(x, [x.shape[d] for d in order], order)
        x = self._gatherer.constrain(x, [spec[d] for d in order])
        trailing = x.shape[x.ndim - (ndim - 2) :]
        return pin_to_devices(x.reshape(self._gatherer.mesh.size, -1, *trailing), self._gatherer)

    def _devices_first(self, spec: Sequence[Any]) -> list[int]:
        """Returns the dimensions, with the sharded ones first, in the order of the devices."""
        axes = batch_axes(self._gatherer.mesh)
        sharded = [d for d, name in enumerate(spec) if name is not None]
        sharded.sort(key=lambda d: (axes.index(layout.full_axis(spec[d])), layout.before(spec[d])))
        return [*sharded, *(d for d, name in enumerate(spec) if name is None)]
