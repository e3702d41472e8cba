"""The loss scale of fp16 training, with the rules by which it halves and doubles.

fp16 has no numbers between 0 and 6e-8, and gradients are often smaller. So the loss is multiplied
by a scale before the backward pass, and the gradient is divided by the scale afterwards. With too
large a scale the gradient overflows; that step is skipped, and the scale decreases.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from zerojax.config import ZeroConfig

_FACTOR = 2.0
# The inverse of a larger scale is subnormal in float32, which processors flush to 0.
_LARGEST = 2.0**126


class LossScaleState(NamedTuple):
    """The state of a loss scale.

    Attributes:
      scale: float32 [], for the next backward pass.
      good: int32 [], steps since the last overflow.
      hysteresis: int32 [], overflows until the scale halves.
      exhausted: bool [], whether the last step overflowed with the scale at its minimum.
    """

    scale: jax.Array
    good: jax.Array
    hysteresis: jax.Array
    exhausted: jax.Array


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A static or dynamic loss scale, with the names and defaults of DeepSpeed's ``fp16`` section.

    The ``hysteresis``-th overflow and every later one halve the scale. The scale doubles after
    every ``loss_scale_window`` steps without an overflow, the first of them not counted. A
    doubling refills the hysteresis, or with ``consecutive_hysteresis`` every good step does; a
    halving does not. The rules are those of DeepSpeed's ``runtime/fp16/loss_scaler.py``, with one
    exception: gradients are always divided by the scale that their backward pass used, even on a
    step that changes the scale.

    Attributes:
      loss_scale: The static scale; 0 for a dynamic one.
      initial_scale_power: The exponent of the first dynamic scale, 2**this.
      loss_scale_window: The number of good steps after which the scale doubles.
      hysteresis: The number of overflows after which the scale halves.
      consecutive_hysteresis: Whether a good step refills the hysteresis.
      min_loss_scale: The smallest dynamic scale.

    Raises:
      ConfigError: A wrong value.

    Example:
      >>> scale = LossScale(initial_scale_power=4, hysteresis=1)
      >>> state = scale.next(scale.init(), finite=False)
      >>> float(state.scale)
      8.0
    """

    loss_scale: float = ZeroConfig.loss_scale
    initial_scale_power: int = ZeroConfig.initial_scale_power
    loss_scale_window: int = ZeroConfig.loss_scale_window
    hysteresis: int = ZeroConfig.hysteresis
    consecutive_hysteresis: bool = ZeroConfig.consecutive_hysteresis
    min_loss_scale: float = ZeroConfig.min_loss_scale

    def __post_init__(self) -> None:
        ZeroConfig(fp16=True, **{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def of(cls, config: ZeroConfig) -> Self:
        """Returns the loss scale that a config asks for."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(
            scale=jnp.asarray(self.loss_scale or _FACTOR**self.initial_scale_power, jnp.float32),
            good=jnp.zeros((), jnp.int32),
            hysteresis=jnp.asarray(self.hysteresis, jnp.int32),
            exhausted=jnp.zeros((), bool),
        )

    def next(self, state: LossScaleState, finite: jax.typing.ArrayLike) -> LossScaleState:
        """Returns the state after a step.

        Args:
          state: The state before the step.
          finite: bool [], whether every gradient of the step is finite.
        """
        if self.loss_scale:
            return state
        finite = jnp.asarray(finite)
        grows = finite & (state.good > 0) & (state.good % self.loss_scale_window == 0)
        shrinks = ~finite & (state.hysteresis == 1)
        bigger = jnp.minimum(state.scale * _FACTOR, _LARGEST)
        smaller = jnp.maximum(state.scale / _FACTOR, self.min_loss_scale)
        refilled = finite if self.consecutive_hysteresis else grows
        spent = jnp.where(finite, state.hysteresis, jnp.maximum(state.hysteresis - 1, 1))
        return LossScaleState(
            scale=jnp.where(grows, bigger, jnp.where(shrinks, smaller, state.scale)),
            good=jnp.where(finite, state.good + 1, 0),
            hysteresis=jnp.where(refilled, self.hysteresis, spent),
            exhausted=shrinks & (state.scale <= self.min_loss_scale),
        )
