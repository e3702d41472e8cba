"""Gradients that an optimizer does not use: those of the parameters that it freezes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from zerojax.xla.unused import used_arguments


def uses(update: Callable[[optax.Updates], Any], grads: optax.Updates) -> list[bool]:
    """For each gradient, whether an optimizer makes an update, or a state, of it.

    ``optax.set_to_zero`` makes neither of what ``optax.partition`` or ``optax.masked`` gives it. A
    norm over all gradients uses all, and so do moments that are kept of a frozen parameter.

    Args:
      update: The optimizer's update as a function of the gradients alone, which is traced.
      grads: The gradients; their values do not matter.

    Example:
      >>> import jax.numpy as jnp
      >>> rules = {"moves": optax.sgd(0.1), "still": optax.set_to_zero()}
      >>> tx = optax.partition(rules, {"base": "still", "w": "moves"})
      >>> params = {"base": jnp.ones(3), "w": jnp.ones(2)}
      >>> uses(lambda grads: tx.update(grads, tx.init(params), params), params)
      [False, True]
    """
    return used_arguments(jax.make_jaxpr(update)(grads))
