"""The ``tx`` of an ``nnx.Optimizer`` whose ``opt_state`` has optax's own structure."""

from __future__ import annotations

import jax
import optax
from flax import nnx

from zerojax.train_state.bound import has_inner
from zerojax.xla.types import PyTree


class NNXTransformation(nnx.Pytree):
    """The ``tx`` of an ``nnx.Optimizer``; the numbers beside optax's state are NNX variables.

    :class:`zerojax.train_state.bound.BoundTransformation` is its counterpart for a ``TrainState``.

    Args:
      tx: The wrapped optimizer.
      numbers: The wrapped optimizer's state without optax's.
    """

    def __init__(self, tx: optax.GradientTransformation, numbers: PyTree) -> None:
        self.tx = tx
        self.numbers = nnx.data(jax.tree.map(nnx.OptState, numbers))

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


def bound_to(optimizer: nnx.Optimizer[nnx.Module]) -> tuple[optax.GradientTransformation, PyTree]:
    """Returns an optimizer's transformation, the one from ``wrap`` if zerojax wrapped it, and the
    tree of variables of that transformation's state."""
    tx = optimizer.tx
    if isinstance(tx, NNXTransformation):
        return tx.tx, tx.numbers.with_inner(optimizer.opt_state)
    return tx, optimizer.opt_state


def bind(
    optimizer: nnx.Optimizer[nnx.Module], tx: optax.GradientTransformation, opt_state: PyTree
) -> None:
    """Replaces an optimizer's transformation and state."""
    optimizer.tx = nnx.static(tx)
    if has_inner(opt_state):
        optimizer.tx = nnx.data(NNXTransformation(tx, opt_state.with_inner(None)))
        opt_state = opt_state.inner
    optimizer.opt_state = nnx.data(jax.tree.map(nnx.OptState, opt_state))
