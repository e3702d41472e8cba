"""Mixture of experts: a token's MLP is the weighted sum of the few experts that a router chooses.

No token is dropped: the tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies them. XLA
cannot partition such a product, so that on several devices `zero.per_device` runs it on each
device's rows (`docs/mixture-of-experts.md`).

Shapes: B batch, T time, D features, F features of an expert, E experts, K experts of a token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from zerojax.models.blocks import INIT_STD
from zerojax.models.loss import widen

Activation = Callable[[jax.Array], jax.Array]
PerDevice = Callable[..., Callable[..., jax.Array]]
"""`zero.per_device`."""


class Experts(nn.Module):
    """[B, T, D] -> [B, T, D]. Source: Jiang et al. 2024, Mixtral (arXiv:2401.04088).

    The router's probabilities of the chosen experts are normalized to the sum 1.
    """

    experts: int
    chosen: int
    features: int
    activation: Activation
    dtype: DTypeLike | None
    per_device: PerDevice | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, inputs = nn.initializers.normal(INIT_STD), x.shape[-1]
        router = nn.Dense(
            self.experts, use_bias=False, dtype=self.dtype, kernel_init=init, name="gate"
        )
        probabilities, chosen = lax.top_k(jax.nn.softmax(widen(router(x))), self.chosen)
        weights = probabilities / probabilities.sum(-1, keepdims=True)
        kernels = [
            self.param(name, init, (self.experts, *shape))
            for name, shape in (
                ("gate_proj", (inputs, self.features)),
                ("up_proj", (inputs, self.features)),
                ("down_proj", (self.features, inputs)),
            )
        ]
        x, *kernels = nn.dtypes.promote_dtype(x, *kernels, dtype=self.dtype)

        run = functools.partial(mix, activation=self.activation)
        if self.per_device and not self.is_initializing():
            return self.per_device(run, replicated=[3, 4, 5])(x, chosen, weights, *kernels)
        return run(x, chosen, weights, *kernels)


def mix(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    activation: Activation,
) -> jax.Array:
    """Computes sum_k weights_k down_e(activation(gate_e x) * up_e x), e = chosen_k, [B, T, D].

    Args:
      x: Features [B, T, D].
      chosen: The experts of each token, int [B, T, K].
      weights: The weights of these experts, [B, T, K].
      gate, up, down: The experts' kernels [E, D, F], [E, D, F] and [E, F, D].
      activation: The activation of the gate.
    """
    rows, per_token = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    order = jnp.argsort(chosen.reshape(-1))  # copies of tokens, those of one expert side by side
    sizes = jnp.bincount(chosen.reshape(-1), length=gate.shape[0])
    copies = rows[order // per_token]
    hidden = activation(lax.ragged_dot(copies, gate, sizes)) * lax.ragged_dot(copies, up, sizes)
    results = lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1, 1)[order].astype(x.dtype)
    return jnp.zeros_like(rows).at[order // per_token].add(results).reshape(x.shape)
