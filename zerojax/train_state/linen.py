"""A flax ``TrainState`` as a training state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import numpy as np
import optax
from flax.core import meta
from jax.sharding import PartitionSpec

from zerojax.train_state.bound import BoundTransformation, bind, unbind
from zerojax.train_state.state_parts import OpenedState, Parts, StateKind, spread_specs
from zerojax.xla.types import PyTree

_PLAIN = "_plain_kind"
"""The attribute in which zerojax's subclass of a state stores the user's class."""
_NAMED = ("params", "opt_state", "step")


def open_state(state: PyTree) -> OpenedState:
    """Splits a ``TrainState``, or a subclass with more fields, into its parts.

    Raises:
      TypeError: The state lacks ``params``, ``tx``, ``opt_state`` or ``step``.
    """
    missing = [f for f in (*_NAMED, "tx") if getattr(state, f, None) is None]
    if missing or not hasattr(state, "replace"):
        raise TypeError(
            f"{type(state).__name__} is not a flax TrainState: it has no "
            f"{' and no '.join(missing) or 'replace method'}. Create the state with "
            "TrainState.create(apply_fn=..., params=..., tx=...)."
        )
    carried = [
        f.name
        for f in dataclasses.fields(state)
        if f.metadata.get("pytree_node", True) and f.name not in (*_NAMED, "tx")
    ]

    def split(state: PyTree) -> Parts:
        rest = {name: getattr(state, name) for name in carried}
        return Parts(state.params, unbind(state.tx, state.opt_state)[1], state.step, rest)

    kind: type = getattr(type(state), _PLAIN, type(state))
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.init}
    fields |= dict.fromkeys([*_NAMED, "tx", *carried])  # keeps no array alive
    empty = kind(**fields)

    def close(parts: Parts, tx: optax.GradientTransformation) -> tuple[PyTree]:
        tx, opt_state = bind(tx, parts.opt_state)
        state_class = _bound_kind(kind) if isinstance(tx, BoundTransformation) else kind
        arrays = {"params": parts.params, "opt_state": opt_state, "step": parts.step, **parts.rest}
        return (state_class(**fields | arrays | {"tx": tx}),)

    return OpenedState(
        StateKind(
            jax.tree.structure(empty),
            split,
            close,
            matches=lambda objects: [lambda x: getattr(type(x), _PLAIN, type(x)) is kind],
        ),
        parts=split(state),
        tx=unbind(state.tx, None)[0],
        specs=own_specs(state.params),
    )


@functools.cache
def _bound_kind(kind: type) -> type:
    """Creates the subclass of a user's ``TrainState`` that holds a :class:`BoundTransformation`: in
    it ``tx`` is a node of the pytree."""
    (field,) = (f for f in dataclasses.fields(kind) if f.name == "tx")
    node = flax.struct.field(
        pytree_node=True,
        default=field.default,
        default_factory=field.default_factory,
        kw_only=field.kw_only,
    )
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = named | {"__annotations__": {"tx": Any}, "tx": node, _PLAIN: kind}
    subclass = type(kind.__name__, (kind,), body)
    return subclass if issubclass(kind, flax.struct.PyTreeNode) else flax.struct.dataclass(subclass)


def is_train_state(x: object) -> bool:
    """Returns whether an object is a flax ``TrainState``, or acts like one. Several states stacked
    into one, as by ``jax.vmap`` over seeds, count as any other pytree."""
    is_state_like = hasattr(x, "opt_state") and hasattr(x, "apply_gradients")
    return is_state_like and not np.ndim(getattr(x, "step", 0))


def own_specs(params: PyTree) -> tuple[PartitionSpec | None, ...]:
    """Returns the user's PartitionSpec of each array, from the flax box of its parameter; None
    without a box."""
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, meta.AxisMetadata))
    return spread_specs([_own_spec(x) for x in boxes], boxes)


def _own_spec(x: object) -> PartitionSpec | None:
    if isinstance(x, nn.LogicallyPartitioned):
        return nn.logical_to_mesh(x.get_partition_spec(), x.rules)
    return x.get_partition_spec() if isinstance(x, meta.Partitioned) else None
