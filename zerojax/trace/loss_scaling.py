"""The loss scale in place of its mark in a traced step, and the check of scaled gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax

from zerojax.optim.loss_scale import LossScaleState
from zerojax.trace.marks import GRADIENT, LOSS, SEED, MarkOrigins, origins_of
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Jaxpr


def replacements(
    closed: AnyJaxpr, loss_scale: LossScaleState | None
) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Returns, by the name of a mark, the function that replaces the marked value.

    Args:
      closed: The jaxpr of the step.
      loss_scale: The state of the loss scale, None without one.

    Raises:
      ValueError: A gradient reaches the optimizer without the loss scale, or not in proportion to
        it, or a loss contains a scaled gradient.
    """
    if loss_scale is None:
        return {}
    _check_scaled(jaxprs.open_jaxpr(closed)[0])
    scale = loss_scale.scale
    return {SEED: lambda seed: seed * scale}


def _check_scaled(jaxpr: Jaxpr) -> None:
    origins = origins_of(jaxpr, SEED)
    gradients = origins[GRADIENT]
    if any(MarkOrigins.MARK in origin for origin in origins[LOSS]):
        raise ValueError(
            "a loss differentiated by zerojax.value_and_grad or zerojax.grad contains another such "
            "gradient, with the loss scale: take the inner one with jax.grad."
        )
    if missing := sum(MarkOrigins.MARK not in origin for origin in gradients):
        raise ValueError(
            f"fp16 is on, and {missing} of {len(gradients)} gradients reach the optimizer without "
            "the loss scale: take them with zerojax.value_and_grad or zerojax.grad, not with "
            "jax's, nnx's or flax DynamicScale's."
        )
    if mixed := sum(MarkOrigins.MIXED in origin for origin in gradients):
        raise ValueError(
            f"fp16 is on, and {mixed} of {len(gradients)} gradients are clipped or added to "
            "before the loss scale is divided out. Move clipping (gradient_clipping), decay and "
            "noise into the optax chain; zerojax.telemetry has the norm."
        )
