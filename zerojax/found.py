"""What the traced step says of itself by its marks, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zerojax import compat
from zerojax.marks import SEED, WEIGHT, count, unscaled_gradients
from zerojax.optim.loss_scale import LossScaleState


class Found:
    """The marks of one traced step.

    Args:
      closed: its jaxpr.
      loss_scale: the state of the loss scale, None without one.
      accumulating: the step is one micro-batch of several.

    Attributes:
      weight: float [], the weight that the micro-batch's loss reports
        (:func:`zerojax.weighted_mean`), once the step has been run with :meth:`replacements`;
        None where it reports none.

    Raises:
      ValueError: a gradient is without the loss scale, or a micro-batch has several weights.
    """

    def __init__(self, closed: Any, loss_scale: LossScaleState | None, accumulating: bool) -> None:
        jaxpr = compat.open_jaxpr(closed)[0]
        self.weight: jax.Array | None = None
        self._loss_scale, self._accumulating = loss_scale, accumulating
        if loss_scale is not None:
            _check_scaled(jaxpr)
        if accumulating:
            _check_weights(jaxpr)

    def replacements(self) -> dict[str, Callable[[jax.Array], jax.Array]]:
        """By the name of a mark: what stands in for it."""

        def noted(weight: jax.Array) -> jax.Array:
            # A rematerialised loss computes it again.
            self.weight = weight if self.weight is None else self.weight
            return weight

        found: dict[str, Callable[[jax.Array], jax.Array]] = {}
        if self._accumulating:
            found[WEIGHT] = noted
        if self._loss_scale is not None:
            scale = self._loss_scale.scale
            found[SEED] = lambda one: one * scale
        return found


def _check_scaled(jaxpr: Any) -> None:
    missing, total = unscaled_gradients(jaxpr)
    if missing:
        raise ValueError(
            f"fp16 is on, but {missing} of {total} gradients reach the optimizer without the loss "
            "scale: take them with zerojax.value_and_grad or zerojax.grad, which scale the loss, "
            "in place of jax's, nnx's or flax DynamicScale's."
        )


def _check_weights(jaxpr: Any) -> None:
    straight, looped = count(jaxpr, WEIGHT)
    if straight > 1 or looped:
        where = "inside a loop or branch" if looped else f"{straight} times"
        raise ValueError(
            f"the step calls zerojax.weighted_mean {where}: the weight of a micro-batch is one "
            "number. Compute the loss with one weighted_mean outside loops, and other means as "
            "jnp.sum(values * weights) / jnp.sum(weights)."
        )
