"""What the last step did, read from the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.optim.wrap import ZeroOptState


def telemetry(state: Any) -> dict[str, jax.Array]:
    """The counters and figures of the last step.

    Args:
      state: a ``TrainState`` that zerojax placed, or an ``nnx.Optimizer``, or a tuple of NNX
        objects with it, or the optimizer state itself.

    Returns:
      Arrays of shape []: ``loss_scale`` (of the next step; 1 without one), ``skipped_steps``,
      ``grad_norm`` (of the last step: global L2, unscaled, before clipping; inf where it was
      skipped), ``learning_rate`` (of the last step; NaN where it cannot be known) and ``step``
      (steps taken, skipped ones among them).

    Raises:
      TypeError: the state did not come from zerojax.
    """
    several = isinstance(state, tuple) and not isinstance(state, ZeroOptState)
    held = [getattr(x, "opt_state", x) for x in (state if several else (state,))]
    opt_state = next((x for x in held if isinstance(x, ZeroOptState)), None)
    if opt_state is None:
        raise TypeError(
            f"{type(state).__name__} holds no zerojax optimizer state: make it with zero.init, "
            "or pass the state that a decorated step returned (within the step it is not there)."
        )

    return report(opt_state)


def report(opt_state: ZeroOptState) -> dict[str, jax.Array]:
    """The same of the optimizer's state alone."""

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
