"""The figures of the last step, read from the state."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim.wrap import UNKNOWN, ZeroOptState, find_zero_state


def telemetry(state: Any) -> dict[str, jax.Array]:
    """The counters and figures of the last step.

    Args:
      state: A ``TrainState`` that zerojax placed, an ``nnx.Optimizer``, a tuple of NNX objects
        that contains one, or a pytree with the state of ``zero.optimizer()`` or ``zero.wrap()``.

    Returns:
      Arrays of shape []: ``loss_scale`` (of the next step; 1 without one), ``skipped_steps``,
      ``grad_norm`` (of the last step: global L2, unscaled, before clipping, without parameters that
      the optimizer freezes; inf if skipped),
      ``learning_rate`` (of the last step; NaN if unknown) and ``step`` (steps taken, skipped ones
      included).

    Raises:
      TypeError: The state has no zerojax optimizer state.
    """
    opt_state = find_zero_state(state)
    if opt_state is None:
        raise TypeError(
            f"{type(state).__name__} holds no zerojax optimizer state: make it with zero.init, "
            "or pass the state that a decorated step returned."
        )

    figures = report(opt_state)
    rate = figures["learning_rate"]
    with jax.debug_nans(False):
        return figures | {"learning_rate": jnp.where(rate == UNKNOWN, jnp.nan, rate)}


def is_known(rate: float) -> bool:
    """Whether a learning rate is one, from either."""
    return rate != UNKNOWN and not math.isnan(rate)


def report(opt_state: ZeroOptState) -> dict[str, jax.Array]:
    """The figures of :func:`telemetry` as the optimizer's state has them, the learning rate
    ``UNKNOWN`` in place of NaN."""

    def value(x: Any) -> jax.Array:
        return jnp.asarray(x[...] if hasattr(x, "get_metadata") else x)

    scale = opt_state.loss_scale
    return {
        "loss_scale": jnp.ones((), jnp.float32) if scale is None else value(scale.scale),
        "skipped_steps": value(opt_state.skipped),
        "grad_norm": value(opt_state.grad_norm),
        "learning_rate": value(opt_state.learning_rate),
        "step": value(opt_state.steps),
    }
