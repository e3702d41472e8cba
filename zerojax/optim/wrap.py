"""What the config asks of an optimizer, around any optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ZeroOptState(NamedTuple):
    """State of a wrapped transformation.

    Attributes:
      inner: the user's optimizer state.
      steps: int32 [], updates made.
      grad_norm: float32 [], global L2 norm of the last gradient, before clipping.
      learning_rate: float32 [], used by the last update; NaN where it cannot be known.
    """

    inner: optax.OptState
    steps: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """A transformation that :func:`wrap` made; wrapping it again changes nothing."""


def wrap(
    tx: optax.GradientTransformation,
    *,
    gradient_clipping: float = 0.0,
    learning_rate: float | optax.Schedule | None = None,
) -> ZeroTransformation:
    r"""Adds global-norm clipping and telemetry to an optax transformation.

    With :math:`n = \lVert g \rVert_2` over all leaves and shards, in float32,

    .. math:: g \leftarrow g \cdot \min(1, c / (n + 10^{-6}))

    where :math:`c` is ``gradient_clipping`` (as DeepSpeed's ``runtime/utils.py`` has it).

    Args:
      tx: any optax transformation.
      gradient_clipping: largest global norm let through; 0 turns clipping off.
      learning_rate: what ``tx`` uses, for telemetry. Without it the rate is read from
        ``optax.inject_hyperparams`` state if there is one.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = wrap(optax.sgd(1.0), gradient_clipping=1.0)
      >>> p = {"w": jnp.zeros(2)}
      >>> u, s = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(p), p)
      >>> round(float(s.grad_norm), 4), [round(float(x), 4) for x in u["w"]]
      (5.0, [-0.6, -0.8])
    """
    if isinstance(tx, ZeroTransformation):
        return tx
    inner_tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> ZeroOptState:
        return adopt(inner_tx.init(params))

    def update(
        grads: optax.Updates, state: ZeroOptState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ZeroOptState]:
        grads = jax.tree.map(_full_precision, grads)
        norm = optax.tree.norm(grads)
        if gradient_clipping:
            factor = jnp.minimum(1.0, gradient_clipping / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        updates, inner = inner_tx.update(grads, state.inner, params, **extra)
        if learning_rate is None:
            rate = _injected_rate(inner)
        else:
            rate = learning_rate(state.steps) if callable(learning_rate) else learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        steps = optax.safe_increment(state.steps)
        return updates, ZeroOptState(inner, steps, norm.astype(jnp.float32), rate)

    return ZeroTransformation(init, update)


def adopt(inner: optax.OptState, steps: Any = 0) -> ZeroOptState:
    """The wrapped state around an optimizer state that exists already."""
    # Separate arrays: a donated buffer may stand in a state only once.
    return ZeroOptState(
        inner,
        jnp.asarray(steps, jnp.int32),
        jnp.zeros((), jnp.float32),
        jnp.full((), jnp.nan, jnp.float32),
    )


def _full_precision(g: jax.Array) -> jax.Array:
    return g.astype(jnp.float32) if g.dtype in (jnp.bfloat16, jnp.float16) else g


def _injected_rate(state: optax.OptState) -> Any:
    found = optax.tree.get_all_with_path(
        state, "learning_rate", filtering=lambda path, value: hasattr(value, "dtype")
    )
    return found[0][1] if found else jnp.nan
