"""The exchange of the 1-bit optimizers: momenta and gradients in 1 bit an element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from zerojax.accumulation.exchange import Errors
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.reduction import add_up, pin_to_devices
from zerojax.config import OptimizerConfig
from zerojax.experimental.one_bit import OneBitState, Sending, one_bit_state, sending
from zerojax.experimental.one_bit_mean import mean_in_one_bit, unpack
from zerojax.optim.wrap import ZeroOptState
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.rule import SMALL


class OneBit:
    """The exchange of the 1-bit optimizers, see :class:`zerojax.accumulation.exchange.Exchange`.

    Args:
      optimizer: The optimizer of the config.
      mesh: The devices.
    """

    def __init__(self, optimizer: OptimizerConfig, mesh: Mesh) -> None:
        self.key: str = f'optimizer.type = "{optimizer.type}"'
        self._optimizer, self._mesh = optimizer, mesh

    def applies_to(self, opt_state: optax.OptState) -> bool:
        """Returns whether the state is that of a 1-bit optimizer."""
        return one_bit_state(opt_state) is not None

    def errors_of(self, leaves: Sequence[Leaf]) -> list[Errors]:
        """Returns the errors of each momentum that is sent in 1 bit an element.

        They are float32 [devices, size], the error in what each device sends, and float32 [devices,
        size / devices], the error in the shard that each device averages. ``size`` is that of the
        parameter, padded so that shards are full bytes; a small parameter has no errors.

        A sharded momentum (stage 1) also has the message that was sent last, the same on all
        devices: bits as uint8 [devices, size / devices / 8], and scales as float32 [devices].
        """
        return [self._errors(leaf) for leaf in leaves]

    def _errors(self, leaf: Leaf) -> Errors:
        count, n = math.prod(leaf.shape), self._mesh.size
        if count <= SMALL or n == 1:
            return ()
        shard_size = -(-count // (8 * n)) * 8
        errors = (jax.ShapeDtypeStruct((n, k), jnp.float32) for k in (n * shard_size, shard_size))
        if not leaf.sharded:
            return tuple(errors)
        bits = jax.ShapeDtypeStruct((n, shard_size // 8), jnp.uint8)
        return (*errors, bits, jax.ShapeDtypeStruct((n,), jnp.float32))

    def reducer(
        self, gatherer: Gatherer, opt_state: ZeroOptState, errors: Sequence[Errors]
    ) -> OneBitMomentum:
        """Returns the reduction of one update."""
        state = one_bit_state(opt_state.inner)
        assert state is not None
        how = sending(state, self._optimizer.with_defaults())
        scale = None if opt_state.loss_scale is None else opt_state.loss_scale.scale
        return OneBitMomentum(gatherer, errors, state, how, scale, self.key)


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
      errors: By parameter, see :meth:`OneBit.errors_of`.
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
        errors: Sequence[Errors],
        state: OneBitState,
        how: Sending,
        scale: jax.Array | None,
        key: str,
    ) -> None:
        self.key: str
        self._gatherer, self._how, self.key = gatherer, how, key
        self._momenta, self._squares = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
        self._scale = jnp.ones((), jnp.float32) if scale is None else scale
        self._errors = [
            tuple(jnp.where(how.anew, jnp.zeros_like(x), x) for x in each) for each in errors
        ]
        self.after: list[Errors] = list(self._errors)

    def reduced(self, parameter: int, parts: jax.Array, spec: Spec) -> jax.Array:
        """Returns a parameter's gradient, float32, from the devices' partial sums
        [devices, *shape]."""
        parts = pin_to_devices(parts.astype(jnp.float32), self._gatherer)
        errors, last = self._errors[parameter][:2], self._errors[parameter][2:]

        def plain(_: object) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            total = self._gatherer.scatter_parts(add_up(parts, 0), spec)
            return total, (*errors, *map(jnp.zeros_like, last))

        def sent(_: object) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return self._sent(parameter, parts, spec, errors, last)

        total, self.after[parameter] = lax.cond(self._how.plain, plain, sent, None)
        return cast(jax.Array, total)

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

        def decoded(_: object) -> jax.Array:
            x = (unpack(codes) * scales[:, None]).reshape(-1)[: momentum.size]
            return x.reshape(momentum.shape)

        def gathered(_: object) -> jax.Array:
            return self._gatherer.constrain(momentum, (None,) * momentum.ndim)

        return cast(jax.Array, lax.cond(jnp.any(scales > 0), decoded, gathered, None))
