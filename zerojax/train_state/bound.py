"""An optimizer in a training state: optax's state in ``opt_state``, zerojax's numbers beside it."""

from __future__ import annotations

import flax.struct
import optax
from flax import nnx

from zerojax.xla.types import PyTree


def has_inner(opt_state: object) -> bool:
    """Returns whether a value is the state of a wrapped transformation."""
    # Not of the instance: an array on a disk would be loaded.
    return hasattr(type(opt_state), "with_inner")


def is_optimizer_state(value: PyTree) -> bool:
    """Returns whether a node is the state of an optax transformation."""
    # optax's states have no class in common: they are NamedTuples of its modules.
    return hasattr(value, "_fields") and type(value).__module__.partition(".")[0] == "optax"


@flax.struct.dataclass(eq=False)
class BoundTransformation:
    """The ``tx`` of a training state whose ``opt_state`` has optax's own structure.

    A wrapped optimizer takes and returns one state around optax's. This class stores the numbers of
    that state as arrays of the optimizer, which is a node of the pytree. A decorated step updates
    the numbers; ``update`` by itself uses them, and returns only optax's state.

    Attributes:
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

    tx: optax.GradientTransformation = flax.struct.field(pytree_node=False)
    numbers: PyTree

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


def bind(
    tx: optax.GradientTransformation, opt_state: PyTree
) -> tuple[optax.GradientTransformation, PyTree]:
    """Returns the optimizer of a training state, and its ``opt_state`` in optax's structure."""
    if not has_inner(opt_state):
        return tx, opt_state
    return BoundTransformation(tx, opt_state.with_inner(None)), opt_state.inner


def unbind(
    tx: optax.GradientTransformation, opt_state: PyTree
) -> tuple[optax.GradientTransformation, PyTree]:
    """Returns the optimizer, and its state, from which :func:`bind` made a training state's."""
    if isinstance(tx, BoundTransformation):
        return tx.tx, tx.numbers.with_inner(opt_state)
    return tx, opt_state
