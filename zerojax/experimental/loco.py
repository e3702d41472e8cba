"""LoCo: a device adds the error of quantizing its gradient to its next gradient.

Each device keeps the error of its own quantization, so that an error has the shape of the unsharded
gradient and differs from device to device. If a gradient is sent twice, within a host and between
hosts, the second quantization also has an error, in the sum that a device receives within its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from zerojax.accumulation.exchange import Errors
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.collectives.reduction import pin_to_devices, reduce_partial_sums
from zerojax.config.keys.loco import Loco
from zerojax.devices.mesh import axis_size, batch_axes
from zerojax.devices.network import near
from zerojax.optim.wrap import ZeroOptState
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.plan.leaf import Leaf
from zerojax.plan.quantized import Quantization, block_of_slice

KEY = "zero_optimization.zeropp_loco_param"


class LoCo:
    """The exchange of quantized gradients with error feedback, see
    :class:`zerojax.accumulation.exchange.Exchange`.

    Args:
      loco: Beta and the period.
      how: The format in which gradients are sent.
      mesh: The devices.
      axis: The axis over which ZeRO shards.
    """

    def __init__(self, loco: Loco, how: Quantization | None, mesh: Mesh, axis: str) -> None:
        self.key: str = KEY
        self._loco, self._how, self._mesh, self._axis = loco, how, mesh, axis

    def applies_to(self, opt_state: optax.OptState) -> bool:
        """Returns True: LoCo serves any optimizer."""
        del opt_state
        return True

    def errors_of(self, leaves: Sequence[Leaf]) -> list[Errors]:
        """Returns the errors of each parameter's gradient, one for each time that the gradient is
        sent; none for a gradient that is not sent quantized.

        An error is float32 [devices, *shape], with the sharded dimension first in ``shape``.
        """
        return [tuple(self._errors(leaf)) for leaf in leaves]

    def _errors(self, leaf: Leaf) -> Iterator[jax.ShapeDtypeStruct]:
        mesh, axis = self._mesh, self._axis
        spec, n = layout.full(leaf.spec, len(leaf.shape)), axis_size(mesh, axis)
        dims = layout.dimensions(spec, axis)
        if len(dims) != 1 or layout.parts(spec[dims[0]], mesh) != n or n == 1:
            return
        (dim,) = dims
        extent, others = leaf.shape[dim], (*leaf.shape[:dim], *leaf.shape[dim + 1 :])
        if extent % n or block_of_slice((extent, *others), n, self._how) is None:
            return
        for parts in self._sends(spec):
            yield jax.ShapeDtypeStruct((mesh.size, extent, *others), jnp.float32)
            extent //= parts

    def _sends(self, spec: Spec) -> list[int]:
        """Returns the number of devices in each exchange in which a gradient is sent quantized."""
        mesh, axis = self._mesh, self._axis
        parts = [layout.parts(name, mesh) for _, name in layout.parts_of(spec, axis)]
        n, close = axis_size(mesh, axis), near(mesh, axis)
        return [close, n // close] if len(parts) == 1 and 1 < close < n else parts

    def reducer(
        self, gatherer: Gatherer, opt_state: ZeroOptState, errors: Sequence[Errors]
    ) -> ErrorFeedback:
        """Returns the reduction of one update."""
        scale = None if opt_state.loss_scale is None else opt_state.loss_scale.scale
        updates = opt_state.steps - opt_state.skipped
        return ErrorFeedback(self._loco, gatherer, errors, updates, scale)


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
      errors: By parameter, see :meth:`LoCo.errors_of`.
      updates: int [], the number of updates so far.
      scale: float32 [], the loss scale of the gradients, which errors are stored without; None
        without one.

    Attributes:
      key: The config key that asks for error feedback.
      after: The errors after the update; unchanged for a gradient that is not sent.
    """

    def __init__(
        self,
        loco: Loco,
        gatherer: Gatherer,
        errors: Sequence[Errors],
        updates: jax.Array,
        scale: jax.Array | None,
    ) -> None:
        self.key: str = KEY
        self._beta, self._gatherer = loco.err_beta, gatherer
        self._scale = jnp.ones((), jnp.float32) if scale is None else scale
        self._ends = (updates + 1) % loco.reset_T == 0
        self.after: list[Errors]
        self._errors, self.after = list(errors), list(errors)

    def reduced(self, parameter: int, parts: jax.Array, spec: Spec) -> jax.Array:
        """Returns the sum of the devices' partial sums [devices, *shape] of a parameter's gradient,
        sharded by ``spec``, float32."""
        (at,) = layout.dimensions(spec, self._gatherer.axis)
        value = pin_to_devices(jnp.moveaxis(parts.astype(jnp.float32), 1 + at, 1), self._gatherer)
        old_errors, new_errors = iter(self._errors[parameter]), []

        def feed_back(x: jax.Array, x_spec: Sequence[SpecEntry], block: Sequence[int]) -> jax.Array:
            old = self._as_sent(next(old_errors), x.shape, x_spec)
            corrected = x + old * self._scale
            new = self._beta * old + (1 - self._beta) * self._lost(corrected, x_spec, block)
            stored = self._at_rest(new, x_spec, value.ndim)
            new_errors.append(jnp.where(self._ends, jnp.zeros_like(stored), stored))
            return corrected

        total = reduce_partial_sums(value, spec, self._gatherer, feed_back)
        self.after[parameter] = tuple(new_errors)
        return total

    def _lost(self, x: jax.Array, spec: Sequence[SpecEntry], block: Sequence[int]) -> jax.Array:
        """Returns the error of quantizing ``x``, without the loss scale."""
        assert self._gatherer.sent.gradients is not None
        form = self._gatherer.sent.gradients.format
        widths = [*(1 for _ in range(x.ndim - len(block))), *block]
        sent = dequantize(*quantize(self._gatherer.constrain(x, spec), widths, form), form, x.dtype)
        return self._gatherer.constrain(x - sent, spec) / self._scale

    def _as_sent(
        self, error: jax.Array, shape: Sequence[int], spec: Sequence[SpecEntry]
    ) -> jax.Array:
        """Returns an error in the shape and spec of the gradient that is sent."""
        order = self._devices_first(spec)
        x = error.reshape([shape[d] for d in order])
        x = self._gatherer.constrain(x, [spec[d] for d in order])
        return self._gatherer.constrain(x.transpose([order.index(d) for d in range(x.ndim)]), spec)

    def _at_rest(self, x: jax.Array, spec: Sequence[SpecEntry], ndim: int) -> jax.Array:
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
