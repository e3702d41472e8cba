"""A flax ``TrainState`` taken apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import meta
from jax.sharding import PartitionSpec

from zerojax.train_state.state_parts import OpenedState, Parts

_NAMED = ("params", "opt_state", "step")


def open_state(state: Any) -> OpenedState:
    """Takes a ``TrainState``, or a subclass with more fields, apart.

    Raises:
      TypeError: The state lacks ``params``, ``tx``, ``opt_state`` or ``step``.
    """
    missing = [f for f in (*_NAMED, "tx") if getattr(state, f, None) is None]
    if missing or not hasattr(state, "replace"):
        raise TypeError(
            f"the first argument of a decorated step is a flax TrainState (or an nnx.Module), but "
            f"{type(state).__name__} has no {' and no '.join(missing) or 'replace method'}. "
            "Build one with TrainState.create(apply_fn=..., params=..., tx=...)."
        )
    carried = [
        f.name
        for f in dataclasses.fields(state)
        if f.metadata.get("pytree_node", True) and f.name not in _NAMED
    ]

    def split(state: Any) -> Parts:
        rest = {name: getattr(state, name) for name in carried}
        return Parts(state.params, state.opt_state, state.step, rest)

    empty = dataclasses.replace(
        state, params=None, opt_state=None, step=None, tx=None, **dict.fromkeys(carried)
    )

    def close(parts: Parts, tx: Any) -> tuple[Any]:
        closed = empty.replace(
            params=parts.params, opt_state=parts.opt_state, step=parts.step, tx=tx, **parts.rest
        )
        return (closed,)

    kind = type(state)

    return OpenedState(
        parts=split(state),
        tx=state.tx,
        split=split,
        close=close,
        key=jax.tree.structure(empty),
        specs=own_specs(state.params),
        matches=[lambda x: isinstance(x, kind)],
    )


def is_train_state(x: Any) -> bool:
    """Whether an object is a flax ``TrainState``, or acts like one; several in one, as under
    ``jax.vmap`` over seeds, are a pytree of which no more is known."""
    acts = hasattr(x, "opt_state") and hasattr(x, "apply_gradients")
    return acts and not np.ndim(getattr(x, "step", 0))


def own_specs(params: Any) -> tuple[Any, ...]:
    """The user's PartitionSpec of each parameter from flax's boxes; None without a box."""
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, meta.AxisMetadata))
    return tuple(_own_spec(x) for x in boxes)


def _own_spec(x: Any) -> PartitionSpec | None:
    if isinstance(x, nn.LogicallyPartitioned):
        return nn.logical_to_mesh(x.get_partition_spec(), x.rules)
    return x.get_partition_spec() if isinstance(x, meta.Partitioned) else None
