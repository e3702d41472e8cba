"""Detection of what an optimizer reads: the gradients, the first values of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import DynamicJaxprTracer

from zerojax.xla import compat, jaxprs
from zerojax.xla.types import AnyJaxpr, PyTree
from zerojax.xla.unused import used_arguments


class Run(Protocol):
    """Runs updates in place of JAX."""

    def suits(self, closed: AnyJaxpr) -> bool:
        """Returns whether an update, a closed jaxpr, runs otherwise than under JAX."""

    def __call__(self, closed: AnyJaxpr, args: Sequence[jax.Array]) -> list[Any]:
        """Returns the results of an update for its flat arguments."""


class TracedUpdate:
    """An optimizer's update, traced once to find the gradients that it uses.

    Neither updates nor moments depend on gradients that ``optax.partition`` or ``optax.masked``
    passes to ``optax.set_to_zero``. A norm over all gradients uses all of them, and moments that
    are kept for a frozen parameter use its gradient.

    Args:
      update: The update, a function of the gradients and of other arguments.
      args: The arguments, the gradients first; their values do not matter.

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

    def __init__(self, update: Callable[..., PyTree], *args: PyTree) -> None:
        self._update = update
        self._traced = jax.jit(update, inline=compat.INLINE)
        traced = self._traced.trace(*args)
        self._jaxpr, self._shapes = traced.jaxpr, traced.out_info
        uses = used_arguments(self._jaxpr)
        captured = len(uses) - len(jax.tree.leaves(args))  # values come first
        self.uses: list[bool] = uses[captured:][: len(jax.tree.leaves(args[0]))]

    def __call__(self, *args: PyTree, run: Run | None = None) -> PyTree:
        """Returns the results of the update for these arguments.

        Args:
          run: Runs the update in place of JAX, if it suits.
        """
        leaves = jax.tree.leaves(args)
        if not all(isinstance(x, DynamicJaxprTracer) for x in leaves):
            return self._update(*args)  # eager calls skip compilation
        captures = len(leaves) < len(jaxprs.open_jaxpr(self._jaxpr)[0].invars)
        if captures or run is None or not run.suits(self._jaxpr):
            return self._traced(*args)  # which JAX inlines faster than equation by equation
        shapes, tree = jax.tree.flatten(self._shapes)
        outs = zip(run(self._jaxpr, leaves), shapes, strict=True)
        # A literal of the jaxpr is a number.
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x, s.dtype) for x, s in outs]
        return jax.tree.unflatten(tree, arrays)


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


def init_reads(tx: optax.GradientTransformation, params: optax.Params) -> bool:
    """Returns whether the first state of ``tx`` depends on the values of the parameters.

    Args:
      tx: The optimizer.
      params: Arrays or their shapes.

    Example:
      >>> w = {"w": jax.ShapeDtypeStruct((2,), "float32")}
      >>> init_reads(optax.adam(1e-3), w), init_reads(optax.contrib.schedule_free_sgd(), w)
      (False, True)
    """
    return any(used_arguments(jax.make_jaxpr(tx.init)(params)))
