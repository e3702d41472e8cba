"""1-bit Adam: Adam whose second moment is frozen after a warm-up.

What is sent in 1 bit then is the first moment; see :mod:`zerojax.collectives.one_bit`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class OneBitAdamState(NamedTuple):
    """State of 1-bit Adam.

    Attributes:
      count: int32 [], updates made.
      mu, nu: The moments, in the form of the parameters.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any


def scale_by_one_bit_adam(
    b1: float, b2: float, eps: float, freeze_step: int, *, bias_correction: bool
) -> optax.GradientTransformation:
    r"""Adam's direction, with the variance of the first ``freeze_step`` updates from then on.

    .. math::

        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
        u = \hat m / (\sqrt{\hat v} + \epsilon)

    The first ``freeze_step`` updates are Adam's; without ``bias_correction`` :math:`\hat m = m` and
    :math:`\hat v = v`, as in DeepSpeed's ``OnebitAdam``. Source: 1-bit Adam, arXiv:2102.02888.
    """

    def init(params: optax.Params) -> OneBitAdamState:
        zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return OneBitAdamState(jnp.zeros((), jnp.int32), *zeros)

    def update(
        grads: optax.Updates, state: OneBitAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, OneBitAdamState]:
        del params
        count = optax.safe_increment(state.count)
        warm = count <= freeze_step
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        nu = jax.tree.map(
            lambda g, v: jnp.where(warm, b2 * v + (1 - b2) * g * g, v), grads, state.nu
        )
        of_mean = 1 - b1 ** count.astype(jnp.float32) if bias_correction else 1.0
        seen = jnp.minimum(count, freeze_step).astype(jnp.float32)
        of_square = 1 - b2**seen if bias_correction else 1.0
        updates = jax.tree.map(lambda m, v: (m / of_mean) / (jnp.sqrt(v / of_square) + eps), mu, nu)
        return updates, OneBitAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def one_bit_state(opt_state: Any) -> OneBitAdamState | None:
    """The state of 1-bit Adam in an optimizer's; None where it has none."""

    def is_one(x: Any) -> bool:
        return isinstance(x, OneBitAdamState)

    return next(filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)), None)
