"""Gradients that an optimizer does not use: those of the parameters that it freezes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.interpreters.partial_eval import DynamicJaxprTracer

from zerojax.xla import compat
from zerojax.xla.unused import used_arguments


class TracedUpdate:
    """Traces an optimizer's update once, to find the gradients that it uses, and applies it.

    Neither updates nor moments depend on gradients that ``optax.partition`` or ``optax.masked``
    gives to ``optax.set_to_zero``. A norm over all gradients uses all, and so do moments that are
    kept of a frozen parameter.

    Args:
      update: The update as a function of the gradients alone.
      grads: The gradients; their values do not matter.

    Attributes:
      uses: For each gradient, whether an update, or the state, depends on it.

    Example:
      >>> import jax.numpy as jnp
      >>> rules = {"moves": optax.sgd(0.5), "still": optax.set_to_zero()}
      >>> tx = optax.partition(rules, {"base": "still", "w": "moves"})
      >>> params = {"base": jnp.ones(3), "w": jnp.ones(2)}
      >>> update = TracedUpdate(lambda grads: tx.update(grads, tx.init(params), params), params)
      >>> update.uses
      [False, True]
      >>> updates, state = update(params)
      >>> updates["base"].tolist(), updates["w"].tolist()
      ([0.0, 0.0, 0.0], [-0.5, -0.5])
    """

    def __init__(self, update: Callable[[optax.Updates], Any], grads: optax.Updates) -> None:
        self._update = update
        self._traced = jax.jit(update, inline=compat.INLINE)
        uses = used_arguments(self._traced.trace(grads).jaxpr)
        self.uses = uses[len(uses) - len(jax.tree.leaves(grads)) :]  # behind what it captures

    def __call__(self, grads: optax.Updates) -> Any:
        """The results of the update for these gradients."""
        staged = all(isinstance(g, DynamicJaxprTracer) for g in jax.tree.leaves(grads))
        return (self._traced if staged else self._update)(grads)  # else it would be compiled


def frozen_leaves(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> list[bool]:
    """For each parameter, whether ``tx`` makes neither an update nor a state of its gradient.

    Args:
      tx: The optimizer.
      params, opt_state: Arrays or their shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"base": jnp.ones(3), "w": jnp.ones(2)}
      >>> frozen_leaves(optax.set_to_zero(), params, optax.EmptyState())
      [True, True]
    """
    closed = jax.make_jaxpr(tx.update)(params, opt_state, params)
    return [not used for used in used_arguments(closed)[: len(jax.tree.leaves(params))]]
