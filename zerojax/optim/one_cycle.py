"""OneCycle: the learning rate up and down once, the momentum down and up.

As DeepSpeed's `runtime/lr_schedules.py` has it. With t = count - 1, n = t + 1, F and S the sizes of
the two halves and D the decay interval, the cycle's height is

    h = n / F                 for n <= F
    h = (F + S - n) / S       for F < n <= F + S

and after the cycle, d = (n - F - S) / D intervals have decayed.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Params: TypeAlias = Mapping[str, Any]
OfStep: TypeAlias = Callable[[jax.Array], jax.Array]
"""A number as a function of t = count - 1, an integer array."""

SECOND_BETA = 0.99
"""What DeepSpeed sets the second beta to, in the cycle and after it, where it cycles the first."""


def cycled_rate(params: Params) -> OfStep:
    """min + (max - min) h; then min / (1 + decay_lr_rate d). At t = -1, min.

    Example:
      >>> rate = cycled_rate({"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2,
      ...     "cycle_second_step_size": None, "decay_lr_rate": 1.0, "decay_step_size": 1})
      >>> [float(rate(t)) for t in range(-1, 5)]
      [1.0, 2.0, 3.0, 2.0, 1.0, 0.5]
    """
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    in_cycle, height, intervals = _shape(params)

    def rate(t: jax.Array) -> jax.Array:
        decayed = low / (1 + params["decay_lr_rate"] * intervals(t))
        return jnp.where(in_cycle(t), low + (high - low) * height(t), decayed)

    return rate


def cycled_momentum(params: Params) -> OfStep:
    """max - (max - min) h; then max (1 + decay_mom_rate d). At t = -1, min.

    The first update's value is DeepSpeed's: it starts at the minimum, at the top of the next.
    A `decay_mom_rate` above 0 lets the momentum grow for ever, to 1 and beyond, as there.

    Example:
      >>> momentum = cycled_momentum({"cycle_min_mom": 0.5, "cycle_max_mom": 1.0,
      ...     "cycle_first_step_size": 2, "cycle_second_step_size": None,
      ...     "decay_mom_rate": -0.5, "decay_step_size": 1})
      >>> [float(momentum(t)) for t in range(-1, 5)]
      [0.5, 0.75, 0.5, 0.75, 1.0, 0.5]
    """
    low, high = params["cycle_min_mom"], params["cycle_max_mom"]
    in_cycle, height, intervals = _shape(params)

    def momentum(t: jax.Array) -> jax.Array:
        decayed = high * (1 + params["decay_mom_rate"] * intervals(t))
        cycled = jnp.where(in_cycle(t), high - (high - low) * height(t), decayed)
        return jnp.where(t < 0, low, cycled)

    return momentum


def _shape(params: Params) -> tuple[OfStep, OfStep, OfStep]:
    """Whether t is in the cycle, the height there, and the intervals decayed after it."""
    up = params["cycle_first_step_size"]
    down = params["cycle_second_step_size"] or up
    # DeepSpeed does not decay at all where the interval is 0.
    every = params["decay_step_size"] or float("inf")

    def height(t: jax.Array) -> jax.Array:
        done = t + 1
        return jnp.where(done <= up, _float(done) / up, _float(up + down - done) / down)

    def intervals(t: jax.Array) -> jax.Array:
        return _float(jnp.maximum(0, t + 1 - up - down)) / every

    return lambda t: t < up + down, height, intervals


def _float(value: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(value, dtype=float)
