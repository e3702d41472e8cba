"""A model, its optimizer and further NNX objects as a training state, updated in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.train_state.bound import BoundTransformation, bind, unbind
from zerojax.train_state.state_parts import (
    IDENTITY,
    STATE_KEY,
    OpenedState,
    Parts,
    StateKind,
    spread_specs,
)
from zerojax.xla import jaxprs
from zerojax.xla.types import PyTree

MODEL = "model"  # the key in Parts.rest of the model's variables beside its parameters


def is_nnx(x: object) -> bool:
    """Returns whether NNX updates ``x`` in place: module, optimizer, metrics, Rngs or Variable."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def has_one_optimizer(objects: Sequence[PyTree]) -> bool:
    """Returns whether one of the objects is an ``nnx.Optimizer`` with no variables of its own."""
    optimizers = [x for x in objects if isinstance(x, nnx.Optimizer)]
    if len(optimizers) != 1 or isinstance(optimizers[0], nnx.ModelAndOptimizer):
        return False
    known = {"step", "opt_state", "tx"}
    own = {name: x for name, x in vars(optimizers[0]).items() if name not in known}
    return not any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(own))


def ordered(objects: Sequence[PyTree]) -> list[int]:
    """Returns the positions of the model, its optimizer, and the other objects in their order.

    Raises:
      TypeError: The objects are not one optimizer and its model.
    """
    if not has_one_optimizer(objects):
        kinds = ", ".join(type(x).__name__ for x in objects)
        raise TypeError(
            f"got {kinds}. Pass a model, its nnx.Optimizer(model, tx, wrt=nnx.Param), no other "
            "optimizer, and further NNX objects in any order."
        )
    (index,) = (i for i, x in enumerate(objects) if isinstance(x, nnx.Optimizer))
    optimizer: nnx.Optimizer[nnx.Module] = objects[index]
    others = [i for i in range(len(objects)) if i != index]

    def trained(i: int) -> PyTree:
        """Returns the variables that the optimizer would train; a bare Variable is not a model."""
        x = objects[i]
        return {} if isinstance(x, nnx.Variable) else nnx.as_pure(nnx.state(x, optimizer.wrt))

    candidates = [i for i in others if jax.tree.leaves(trained(i))]
    if not candidates:
        kinds = ", ".join(type(objects[i]).__name__ for i in others)
        raise TypeError(
            f"none of {kinds or 'the arguments'} has variables for the optimizer "
            f"(wrt={optimizer.wrt!r}). Pass the model too."
        )
    if len(candidates) > 1:
        # Several could be trained: choose the model that the optimizer's state fits.
        actual = [x.shape for x in jax.tree.leaves(nnx.as_pure(optimizer.opt_state))]
        expected = {i: jax.eval_shape(optimizer.tx.init, trained(i)) for i in candidates}
        fitting = [
            i for i, x in expected.items() if [y.shape for y in jax.tree.leaves(x)] == actual
        ]
        candidates = fitting or candidates
    return [candidates[0], index, *(i for i in others if i != candidates[0])]


def open_objects(objects: tuple[PyTree, ...], *, read_only: bool = False) -> OpenedState:
    """Splits NNX objects, in any order, into their parts.

    ``Parts.rest`` has the model's variables beside its parameters as ``"model"``, and those of the
    other objects as ``"2"``, ``"3"`` and so on. A variable that two objects share belongs to the
    first. If the step updates the objects by optimizers of its own, wherever these are, all
    variables are in ``Parts.rest``, those of the first object as ``"state[0]"``, and so on.

    Args:
      objects: The objects.
      read_only: Whether the optimizer may be absent, in a function that trains nothing. The first
        module is then the model, and its ``nnx.Param`` are the parameters.

    Raises:
      TypeError: The objects are not one optimizer and its model, or no module.
    """
    nodes, index, wrt = _nodes(objects, read_only)
    has_model = wrt is not False
    names = [str(i + 1) if i else MODEL for i in range(len(nodes))]
    if not has_model:
        names = [f"{STATE_KEY}[{i}]" for i in nodes]
    count = len(objects)  # closures below must not keep objects alive
    matches_wrt = nnx.filterlib.to_predicate(wrt)

    def trained(path: tuple[Any, ...], x: object) -> bool:
        return path[0] == 0 and matches_wrt(path[1:], x)

    def opened(objects: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        # The nodes are one graph, as they may share variables.
        return nnx.split(tuple(objects[i] for i in nodes), trained, ...)

    def split(*objects: PyTree) -> Parts:
        params, rest = map(nnx.as_pure, opened(objects)[1:])
        opt_state: PyTree = optax.EmptyState()
        step: jax.typing.ArrayLike = np.zeros((), np.int32)
        if index is not None:
            opt_state = nnx.as_pure(unbind(objects[index].tx, objects[index].opt_state)[1])
            step = objects[index].step.get_value()
        return Parts(
            _object_variables(params, 0) if has_model else {},
            opt_state,
            step,
            {name: _object_variables(rest, i) for i, name in enumerate(names)},
        )

    def joined(parts: Parts) -> tuple[nnx.State[int, object], ...]:
        rest = nnx.State({i: parts.rest[name] for i, name in enumerate(names)})
        return (nnx.State({0: parts.params}), rest) if has_model else (rest,)

    graph, trained_state, _ = opened(objects)
    if index is not None:
        optimizer_graph, optimizer_state = nnx.split(objects[index])
        # The arrays are replaced: keep their shapes, not their memory.
        shapes = jax.tree.map(jaxprs.like, nnx.as_pure(optimizer_state))

    def close(parts: Parts, tx: optax.GradientTransformation) -> tuple[object, ...]:
        merged = dict(zip(nodes, nnx.merge(graph, *joined(parts)), strict=True))
        if index is not None:
            merged[index] = nnx.merge(optimizer_graph, shapes)
            _adopt(merged[index], parts, tx)
        return tuple(merged[i] for i in range(count))

    def write_back(
        objects: tuple[PyTree, ...], parts: Parts, tx: optax.GradientTransformation
    ) -> None:
        nnx.update(tuple(objects[i] for i in nodes), *joined(parts))
        if index is not None:
            _write_optimizer(objects[index], parts, tx)

    tree: Any
    specs, tree = jax.tree.flatten(
        nnx.as_pure(nnx.get_partition_spec(trained_state)),
        is_leaf=lambda s: isinstance(s, PartitionSpec),
    )
    key = _Graph(graph), index is not None and type(objects[index]), index, *nodes, *names
    kind = StateKind(
        key, split, close, write_back, any_pytree=not has_model, knows_parameters=has_model
    )
    return OpenedState(
        kind,
        parts=split(*objects),
        tx=IDENTITY if index is None else unbind(objects[index].tx, None)[0],
        specs=spread_specs(specs, tree.flatten_up_to(nnx.as_pure(trained_state))),
    )


def _nodes(
    objects: Sequence[PyTree], read_only: bool
) -> tuple[list[int], int | None, nnx.filterlib.Filter]:
    """Returns the positions of the model and of the other objects; that of the model's optimizer;
    and the filter of the variables that the optimizer trains, False where the step has no model
    with one optimizer."""
    if has_one_optimizer(objects) or (
        read_only and any(isinstance(x, nnx.Optimizer) for x in objects)
    ):
        model, index, *others = ordered(objects)
        return [model, *others], index, objects[index].wrt
    if not read_only:
        return [*range(len(objects))], None, False
    modules = [i for i, x in enumerate(objects) if isinstance(x, nnx.Module)]
    if not modules:
        raise TypeError(
            f"none of {', '.join(type(x).__name__ for x in objects)} is an nnx.Module. Call a "
            "function of zero.evaluate with (state, batch, ...) or (model, batch, ...)."
        )
    return [modules[0], *(i for i in range(len(objects)) if i != modules[0])], None, nnx.Param


def _write_optimizer(
    optimizer: nnx.Optimizer[nnx.Module], parts: Parts, tx: optax.GradientTransformation
) -> None:
    """Writes the optimizer's arrays into its variables, or replaces the variables by others."""
    # Not nnx.update, which skips a value that it does not recognize as an array: one on disk.
    old, variables = unbind(optimizer.tx, optimizer.opt_state)
    leaves = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nnx.Variable))
    if old is not tx or len(leaves) != len(jax.tree.leaves(parts.opt_state)):
        return _adopt(optimizer, parts, tx)
    for variable, x in zip(leaves, jax.tree.leaves(parts.opt_state), strict=True):
        variable.set_value(x)
    optimizer.step.set_value(parts.step)


def graph_hash(graph: object) -> int | None:
    """Returns a graph's hash; None if a module has an unhashable attribute beside its arrays (a
    config, say), which ``nnx.jit`` permits."""
    try:
        return hash(graph)
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A graph as a key. Equality misses an attribute changed in place; the hash does not."""

    graph: object

    def __hash__(self) -> int:
        return graph_hash(self.graph) or 0


def from_cached_partial() -> bool:
    """Consumes the cache of ``nnx.cached_partial``, as flax requires. Returns whether the cache was
    set."""
    with nnx.update_context("zerojax") as context:
        return context.static_cache is not None


Settings = dict[tuple[Any, ...], object]


def settings(objects: tuple[PyTree, ...]) -> Settings:
    """Returns the attributes that are plain values (``deterministic``, say) by path and name."""
    plain = bool | int | float | str | None
    return {
        (*path, name): value
        for path, node in (nnx.iter_graph(objects) if any(map(is_nnx, objects)) else ())
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        if isinstance(value, plain)
    }


def apply_settings(objects: tuple[PyTree, ...], changed: Settings) -> None:
    """Sets attributes to new values, as a step under ``nnx.jit`` does to its arguments."""
    nodes = dict(nnx.iter_graph(objects)) if changed else {}
    for (*path, name), value in changed.items():
        setattr(nodes[tuple(path)], name, value)


def _adopt(
    optimizer: nnx.Optimizer[nnx.Module], parts: Parts, tx: optax.GradientTransformation
) -> None:
    """Replaces an optimizer's transformation and state."""
    tx, opt_state = bind(tx, jax.tree.map(nnx.OptState, parts.opt_state))
    is_node = isinstance(tx, BoundTransformation)
    optimizer.tx = nnx.data(tx) if is_node else nnx.static(tx)
    optimizer.opt_state = nnx.data(opt_state)
    optimizer.step.set_value(parts.step)


def _object_variables(state: nnx.State[int, object], i: int) -> PyTree:
    """Returns the variables of one of several objects; a bare Variable is an array."""
    found = state.raw_mapping.get(i, {})
    return nnx.State(found) if isinstance(found, dict) else found
