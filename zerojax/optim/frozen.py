"""Detection of gradients that an optimizer does not use: those of frozen parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax
from jax.interpreters.partial_eval import DynamicJaxprTracer

from zerojax.xla import compat
from zerojax.xla.types import PyTree
from zerojax.xla.unused import used_arguments


class TracedUpdate:
    """An optimizer's update, traced once to find the gradients that it uses.

    Neither updates nor moments depend on gradients that ``optax.partition`` or ``optax.masked``
    passes to ``optax.set_to_zero``. A norm over all gradients uses all of them, and moments that
    are kept for a frozen parameter use its gradient.

    Args:
      update: The update as a function of only the gradients.
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

    def __init__(self, update: Callable[[optax.Updates], PyTree], grads: optax.Updates) -> None:
        self._update = update
        self._traced = jax.jit(update, inline=compat.INLINE)
        uses = used_arguments(self._traced.trace(grads).jaxpr)
        self.uses: list[bool] = uses[
            len(uses) - len(jax.tree.leaves(grads)) :
        ]  # after captured values

    def __call__(self, grads: optax.Updates) -> PyTree:
        """Returns the results of the update for these gradients."""
        staged = all(isinstance(g, DynamicJaxprTracer) for g in jax.tree.leaves(grads))
        return (self._traced if staged else self._update)(grads)  # eager calls skip compilation


def frozen_leaves(
    tx: optax.GradientTransformation, params: optax.Params, opt_state: optax.OptState
) -> list[bool]:
    """Returns, for each parameter, whether ``tx`` ignores its gradient in update and state.

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
