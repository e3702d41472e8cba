"""An optimizer in a training state: optax's state in ``opt_state``, zerojax's numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax import nnx, serialization

from zerojax.xla.types import PyTree


def has_inner(opt_state: object) -> bool:
    """Returns whether a value is the state of a wrapped transformation."""
    return hasattr(opt_state, "with_inner")


@jax.tree_util.register_pytree_with_keys_class
class BoundTransformation:
    """The ``tx`` of a training state whose ``opt_state`` has optax's own structure.

    A wrapped optimizer takes and returns one state around optax's. This class stores the numbers of
    that state as arrays of the optimizer, which is a node of the pytree. A decorated step updates
    the numbers; ``update`` by itself uses them, and returns only optax's state.

    Args:
      tx: The wrapped optimizer.
      numbers: The wrapped optimizer's state without optax's; NNX variables in an
        ``nnx.Optimizer``.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax
      >>> wrapped = zerojax.wrap(optax.adam(0.1))
      >>> params = {"w": jnp.ones(2)}
      >>> tx, opt_state = bind(wrapped, wrapped.init(params))
      >>> updates, opt_state = tx.update({"w": jnp.ones(2)}, opt_state, params)
      >>> opt_state[0].count.tolist(), tx.numbers.steps.tolist()
      (1, 0)
    """

    def __init__(self, tx: optax.GradientTransformation, numbers: PyTree) -> None:
        self.tx, self.numbers = tx, numbers

    def init(self, params: PyTree) -> PyTree:
        """Returns optax's state of a new optimizer."""
        return self.tx.init(params).inner

    def update(
        self, grads: PyTree, opt_state: PyTree, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates and optax's new state."""
        state = nnx.as_pure(self.numbers).with_inner(opt_state)
        updates, after = self.tx.update(grads, state, params, **extra)
        return updates, after.inner

    def tree_flatten_with_keys(
        self,
    ) -> tuple[list[tuple[jax.tree_util.GetAttrKey, PyTree]], optax.GradientTransformation]:
        return [(jax.tree_util.GetAttrKey("numbers"), self.numbers)], self.tx

    @classmethod
    def tree_unflatten(
        cls, tx: optax.GradientTransformation, children: Sequence[PyTree]
    ) -> BoundTransformation:
        return cls(tx, *children)


def bind(tx: optax.GradientTransformation, opt_state: PyTree) -> tuple[BoundTransformation, PyTree]:
    """Returns the optimizer of a training state, and its ``opt_state`` in optax's structure."""
    return BoundTransformation(tx, opt_state.with_inner(None)), opt_state.inner


def _to_state_dict(bound: BoundTransformation) -> dict[str, object]:
    return {"numbers": serialization.to_state_dict(bound.numbers)}


def _from_state_dict(bound: BoundTransformation, saved: dict[str, Any]) -> BoundTransformation:
    numbers = serialization.from_state_dict(bound.numbers, saved["numbers"])
    return BoundTransformation(bound.tx, numbers)


serialization.register_serialization_state(BoundTransformation, _to_state_dict, _from_state_dict)
