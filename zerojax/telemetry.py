"""What the last step did, read from the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim.wrap import ZeroOptState


def telemetry(state: Any) -> dict[str, jax.Array]:
    """The counters and figures of the last step.

    Args:
      state: a ``TrainState`` that zerojax placed, or an ``nnx.Optimizer``, or the pair
        ``(model, optimizer)``.

    Returns:
      Arrays of shape []: ``loss_scale`` (1 without fp16), ``skipped_steps``, ``grad_norm``
      (global L2, before clipping), ``learning_rate`` (NaN where it cannot be known) and
      ``step`` (updates made).

    Raises:
      TypeError: the state did not come from zerojax.
    """
    holder = state[1] if isinstance(state, tuple) and len(state) == 2 else state
    opt_state = getattr(holder, "opt_state", holder)
    if not isinstance(opt_state, ZeroOptState):
        raise TypeError(
            f"{type(state).__name__} holds no zerojax optimizer state: make it with zero.init, "
            "or pass the state that a decorated step returned."
        )

    def value(x: Any) -> jax.Array:
        return jnp.asarray(x[...] if hasattr(x, "get_metadata") else x)

    return {
        "loss_scale": jnp.ones((), jnp.float32),
        "skipped_steps": jnp.zeros((), jnp.int32),
        "grad_norm": value(opt_state.grad_norm),
        "learning_rate": value(opt_state.learning_rate),
        "step": value(opt_state.steps),
    }
