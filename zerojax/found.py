"""What the traced step says of itself by its marks, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zerojax import compat
from zerojax.marks import GRADIENT, LOSS, SEED, WEIGHT, Way, count, ways
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
            if weight.ndim:
                raise ValueError(
                    f"zerojax.weighted_mean under vmap gives {weight.size} weights for a "
                    "micro-batch, which has one: take the mean over all of it, outside vmap."
                )
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
    found = ways(jaxpr, SEED)
    gradients = found[GRADIENT]
    if any(Way.MARK in way for way in found[LOSS]):
        raise ValueError(
            "a loss that zerojax.value_and_grad or zerojax.grad takes the gradient of has such a "
            "gradient in it, with the loss scale: take the inner one with jax.grad."
        )
    if missing := sum(Way.MARK not in way for way in gradients):
        raise ValueError(
            f"fp16 is on, but {missing} of {len(gradients)} gradients reach the optimizer without "
            "the loss scale: take them with zerojax.value_and_grad or zerojax.grad, which scale "
            "the loss (without loss_scale=), in place of jax's, nnx's or flax DynamicScale's."
        )
    if mixed := sum(Way.MIXED in way for way in gradients):
        raise ValueError(
            f"fp16 is on, and {mixed} of {len(gradients)} gradients are clipped, or added to "
            "something else, before they reach the optimizer: there they still are larger by the "
            "loss scale. Put clipping, decay and noise into the optax chain (gradient_clipping "
            "does the first); zerojax.telemetry has the norm."
        )


def _check_weights(jaxpr: Any) -> None:
    straight, *elsewhere = count(jaxpr, WEIGHT)
    if straight and not any(Way.MARK in way for way in ways(jaxpr, WEIGHT)[GRADIENT]):
        raise ValueError(
            "the step calls zerojax.weighted_mean, but not in the loss: it would weigh the "
            "gradients of another mean. Compute metrics as jnp.sum(values * weights) / "
            "jnp.sum(weights)."
        )
    if straight > 1 or any(elsewhere):
        where = "inside a loop or branch" if any(elsewhere) else f"{straight} times"
        raise ValueError(
            f"the step calls zerojax.weighted_mean {where}: the weight of a micro-batch is one "
            "number. Compute the loss with one weighted_mean outside loops, and other means as "
            "jnp.sum(values * weights) / jnp.sum(weights)."
        )
