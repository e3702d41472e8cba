"""An ``nnx.Module`` and its ``nnx.Optimizer`` taken apart, and brought up to date in place."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.parts import Opened, Parts


def open_pair(model: nnx.Module, optimizer: Any) -> Opened:
    """Takes a model and its optimizer apart.

    Raises:
      TypeError: ``optimizer`` is no ``nnx.Optimizer``.
    """
    if not isinstance(optimizer, nnx.Optimizer) or isinstance(optimizer, nnx.ModelAndOptimizer):
        raise TypeError(
            "a decorated NNX step is called as step(model, optimizer, batch, ...) with an "
            f"nnx.Optimizer(model, tx, wrt=nnx.Param) second, not {type(optimizer).__name__}."
        )
    graph, *states = nnx.split(model, optimizer.wrt, ...)

    def split(model: nnx.Module, optimizer: Any) -> Parts:
        _, *states = nnx.split(model, optimizer.wrt, ...)
        params, rest = map(nnx.as_pure, states)
        opt_state = nnx.as_pure(optimizer.opt_state)
        return Parts(params, opt_state, optimizer.step.get_value(), {"model": rest})

    # The optimizer's own arrays are replaced below: keep their shapes, not their memory.
    optimizer_graph, optimizer_state = nnx.split(optimizer)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.as_pure(optimizer_state)
    )

    def close(parts: Parts, tx: Any) -> tuple[nnx.Module, Any]:
        closed = nnx.merge(optimizer_graph, shapes)
        adopt(closed, parts, tx)
        return nnx.merge(graph, parts.params, parts.rest["model"]), closed

    return Opened(
        parts=split(model, optimizer),
        tx=optimizer.tx,
        split=split,
        close=close,
        key=(graph, type(optimizer)),
        specs=own_specs(states[0]),
    )


def own_specs(params: Any) -> tuple[Any, ...]:
    """The user's PartitionSpec of each parameter, of an ``nnx.State`` of them."""
    specs = nnx.as_pure(nnx.get_partition_spec(params))
    return tuple(jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec)))


def adopt(optimizer: Any, parts: Parts, tx: Any) -> None:
    """Gives an optimizer another transformation and its state."""
    optimizer.tx = tx
    optimizer.opt_state = nnx.data(jax.tree.map(nnx.OptState, parts.opt_state))
    optimizer.step.set_value(parts.step)


def update(model: nnx.Module, optimizer: Any, parts: Parts, tx: Any) -> None:
    """Brings the user's own objects up to date, as ``nnx.jit`` does."""
    nnx.update(model, parts.params, parts.rest["model"])
    if optimizer.tx is tx:
        # Not nnx.update, which passes over what it does not take for an array: one on disk.
        held = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for variable, x in zip(held, jax.tree.leaves(parts.opt_state), strict=True):
            variable.set_value(x)
        optimizer.step.set_value(parts.step)
    else:
        adopt(optimizer, parts, tx)
