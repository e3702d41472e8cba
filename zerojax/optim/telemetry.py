"""The counters and figures of the last step, read from the state."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from zerojax.optim.wrap import UNKNOWN, ZeroOptState, find_zero_state
from zerojax.xla.types import PyTree


def telemetry(state: PyTree) -> dict[str, jax.Array]:
    """Returns the counters and figures of the last step.

    Args:
      state: A ``TrainState`` that zerojax placed, an ``nnx.Optimizer``, a tuple of NNX objects
        that contains one, a pytree with the state of ``zero.optimizer()`` or ``zero.wrap()``, or
        the decorated step itself, whose figures are those of its last call, with a state of any
        kind.

    Returns:
      A ``dict`` of arrays of shape []: ``loss_scale`` (of the next step; 1 without a loss scale),
      ``skipped_steps``, ``grad_norm`` (of the last step: global L2, unscaled, before clipping,
      without parameters that the optimizer freezes; inf if the step was skipped; NaN if unknown. If
      the step brings its own optimizer: of the gradients as ``jax.grad`` returns them, before the
      step divides or clips them; unknown if zerojax cannot be certain of the gradients, as with
      several updates of one parameter), ``learning_rate`` (of the last step; NaN if unknown) and
      ``step`` (all steps, including skipped ones).

    Raises:
      TypeError: The state has no zerojax optimizer state.
    """
    opt_state = find_zero_state(getattr(state, "zero_state", state))
    if opt_state is None:
        raise TypeError(
            f"{type(state).__name__} has no zerojax optimizer state: pass one of zero.init or the "
            "step."
        )

    figures = report(opt_state)
    with jax.debug_nans(False):
        known = {
            name: jnp.where(figures[name] == UNKNOWN, jnp.nan, figures[name])
            for name in ("grad_norm", "learning_rate")
        }
    return figures | known


def is_known(rate: float) -> bool:
    """Returns whether a rate or a norm from :func:`telemetry` or :func:`report` is known."""
    return rate != UNKNOWN and not math.isnan(rate)


def report(opt_state: ZeroOptState) -> dict[str, jax.Array]:
    """Returns the figures of :func:`telemetry` as they are stored, with ``UNKNOWN`` in place of
    NaN."""

    def value(x: PyTree) -> jax.Array:
        return jnp.asarray(x[...] if hasattr(x, "get_metadata") else x)

    scale = opt_state.loss_scale
    return {
        "loss_scale": jnp.ones((), jnp.float32) if scale is None else value(scale.scale),
        "skipped_steps": value(opt_state.skipped),
        "grad_norm": value(opt_state.grad_norm),
        "learning_rate": value(opt_state.learning_rate),
        "step": value(opt_state.steps),
    }
