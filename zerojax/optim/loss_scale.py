"""The loss scale of fp16 training: when it halves, when it doubles.

fp16 holds nothing between 0 and 6e-8, and gradients are often smaller. The loss is therefore
multiplied by a scale before the backward pass and the gradient divided by it after. Where the
scale was too large the gradient overflows; that step is skipped, and the scale comes down.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from zerojax.config import ZeroConfig

_FACTOR = 2.0
# The inverse of a larger one is subnormal in float32, which processors take for 0.
_LARGEST = 2.0**126


class LossScaleState(NamedTuple):
    """Where a loss scale stands.

    Attributes:
      scale: float32 [], for the next backward pass.
      good: int32 [], steps since the last overflow.
      hysteresis: int32 [], overflows until the scale halves.
      exhausted: bool [], the last step overflowed and the scale is at its minimum already.
    """

    scale: jax.Array
    good: jax.Array
    hysteresis: jax.Array
    exhausted: jax.Array


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A static or dynamic loss scale, with the names and defaults of DeepSpeed's ``fp16`` section.

    An overflow halves the scale, but only the ``hysteresis``-th one does and those after it. The
    scale doubles after every ``loss_scale_window`` steps without an overflow, the first of them
    not counted. The hysteresis is full again after a doubling, or with
    ``consecutive_hysteresis`` after every good step; a halving does not refill it. (DeepSpeed's
    ``runtime/fp16/loss_scaler.py``, but for one thing: gradients are divided by the scale that
    their backward pass used, on a step that changes it too.)

    Attributes:
      loss_scale: a fixed scale; 0 is dynamic.
      initial_scale_power: the dynamic scale starts at 2 to this power.
      loss_scale_window, hysteresis, consecutive_hysteresis: as above.
      min_loss_scale: the dynamic scale falls no lower.

    Raises:
      ConfigError: a value that cannot be.

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
        """The loss scale that a config asks for."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(
            scale=jnp.asarray(self.loss_scale or _FACTOR**self.initial_scale_power, jnp.float32),
            good=jnp.zeros((), jnp.int32),
            hysteresis=jnp.asarray(self.hysteresis, jnp.int32),
            exhausted=jnp.zeros((), bool),
        )

    def next(self, state: LossScaleState, finite: jax.typing.ArrayLike) -> LossScaleState:
        """The state after a step.

        Args:
          state: before it.
          finite: bool [], whether every gradient was.
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
