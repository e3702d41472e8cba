"""A model, its optimizer and further NNX objects as a training state, updated in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from zerojax.train_state.nnx_bound import bind, bound_to
from zerojax.train_state.state_parts import (
    IDENTITY,
    STATE_KEY,
    OpenedState,
    Parts,
    StateKind,
    spread_specs,
)
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
    optimizers = [i for i, x in enumerate(objects) if isinstance(x, nnx.Optimizer)]
    if not has_one_optimizer(objects):
        kinds = ", ".join(type(x).__name__ for x in objects)
        raise TypeError(
            f"got {kinds}. Pass a model, its nnx.Optimizer(model, tx, wrt=nnx.Param), no other "
            "optimizer, and further NNX objects in any order."
        )
    optimizer: nnx.Optimizer[nnx.Module] = objects[optimizers[0]]
    others = [i for i in range(len(objects)) if i != optimizers[0]]
    candidates = [i for i in others if isinstance(objects[i], nnx.Module)]
    if len(candidates) != 1:  # metrics and Rngs are usually not modules
        candidates = [i for i in others if _parameters(objects[i], optimizer)]
    if len(candidates) > 1:
        # Several could be trained: choose the model that the optimizer's state fits.
        candidates = [i for i in candidates if _fits(objects[i], optimizer)] or candidates
    if not candidates:
        raise _untrainable([objects[i] for i in others], optimizer)
    return [candidates[0], optimizers[0], *(i for i in others if i != candidates[0])]


def open_objects(objects: tuple[PyTree, ...], *, read_only: bool = False) -> OpenedState:
    """Splits a model, its optimizer and other objects, in any order, into their parts.

    ``Parts.rest`` has the model's variables beside its parameters as ``"model"``, and those of the
    other objects as ``"2"``, ``"3"`` and so on. A variable that two objects share belongs to the
    first.

    Args:
      objects: The objects.
      read_only: Whether the optimizer may be absent, in a function that trains nothing. The first
        module is then the model, and its ``nnx.Param`` are the parameters.

    Raises:
      TypeError: The objects are not one optimizer and its model, or no module.
    """
    index: int | None = None
    if read_only and not any(isinstance(x, nnx.Optimizer) for x in objects):
        nodes, wrt = _module_first(objects), nnx.Param
    else:
        model, index, *others = ordered(objects)
        nodes, wrt = [model, *others], objects[index].wrt
    count = len(objects)  # closures below must not keep objects alive
    matches_wrt = nnx.filterlib.to_predicate(wrt)

    def trained(path: tuple[Any, ...], x: object) -> bool:
        return path[0] == 0 and matches_wrt(path[1:], x)

    def opened(
        objects: tuple[PyTree, ...],
    ) -> tuple[nnx.GraphDef[Any], list[nnx.State[int, object]]]:
        # The nodes are one graph, as they may share variables.
        graph, *states = nnx.split(tuple(objects[i] for i in nodes), trained, ...)
        return graph, states

    def split(*objects: PyTree) -> Parts:
        params, rest = (nnx.as_pure(state) for state in opened(objects)[1])
        opt_state: PyTree = optax.EmptyState()
        step: jax.typing.ArrayLike = np.zeros((), np.int32)
        if index is not None:
            opt_state = nnx.as_pure(bound_to(objects[index])[1])
            step = objects[index].step.get_value()
        return Parts(
            _object_variables(params, 0),
            opt_state,
            step,
            {
                MODEL: _object_variables(rest, 0),
                **{str(i + 1): _object_variables(rest, i) for i in range(1, len(nodes))},
            },
        )

    def joined(parts: Parts) -> tuple[nnx.State[int, object], nnx.State[int, object]]:
        rest = {i: parts.rest[MODEL if not i else str(i + 1)] for i in range(len(nodes))}
        return nnx.State({0: parts.params}), nnx.State(rest)

    graph, states = opened(objects)
    if index is not None and not jax.tree.leaves(states[0]):
        raise _untrainable([objects[i] for i in nodes], objects[index])
    restored = None if index is None else _restored(objects[index])

    def close(parts: Parts, tx: optax.GradientTransformation) -> tuple[object, ...]:
        merged = dict(zip(nodes, nnx.merge(graph, *joined(parts)), strict=True))
        if index is not None and restored is not None:
            merged[index] = restored(parts, tx)
        return tuple(merged[i] for i in range(count))

    def write_back(
        objects: tuple[PyTree, ...], parts: Parts, tx: optax.GradientTransformation
    ) -> None:
        nnx.update(tuple(objects[i] for i in nodes), *joined(parts))
        if index is not None:
            _write_optimizer(objects[index], parts, tx)

    tree: Any
    specs, tree = jax.tree.flatten(
        nnx.as_pure(nnx.get_partition_spec(states[0])),
        is_leaf=lambda s: isinstance(s, PartitionSpec),
    )
    key = _Graph(graph), index is not None and type(objects[index]), index, *nodes
    return OpenedState(
        StateKind(key, split, close, write_back),
        parts=split(*objects),
        tx=IDENTITY if index is None else bound_to(objects[index])[0],
        specs=spread_specs(specs, tree.flatten_up_to(nnx.as_pure(states[0]))),
    )


def open_graph(objects: tuple[PyTree, ...]) -> OpenedState:
    """Splits NNX objects that the step updates by optimizers of its own, wherever these are. All
    variables are in ``Parts.rest``, those of the first object as ``"state[0]"``, and so on."""
    count = len(objects)
    graph = nnx.split(objects)[0]

    def split(*objects: PyTree) -> Parts:
        state = nnx.as_pure(nnx.split(objects)[1])
        rest = {f"{STATE_KEY}[{i}]": _object_variables(state, i) for i in range(count)}
        return Parts({}, optax.EmptyState(), jnp.zeros((), jnp.int32), rest)

    def joined(parts: Parts) -> nnx.State[int, object]:
        return nnx.State({i: parts.rest[f"{STATE_KEY}[{i}]"] for i in range(count)})

    kind = StateKind(
        (_Graph(graph), count),
        split,
        close=lambda parts, tx: nnx.merge(graph, joined(parts)),
        write_back=lambda objects, parts, tx: nnx.update(objects, joined(parts)),
        any_pytree=True,
        knows_parameters=False,
    )
    return OpenedState(kind, split(*objects), IDENTITY)


def _module_first(objects: Sequence[PyTree]) -> list[int]:
    """Returns the positions of the first module and of the other objects."""
    modules = [i for i, x in enumerate(objects) if isinstance(x, nnx.Module)]
    if not modules:
        raise TypeError(
            f"none of {', '.join(type(x).__name__ for x in objects)} is an nnx.Module. Call a "
            "function of zero.evaluate with (state, batch, ...) or (model, batch, ...)."
        )
    return [modules[0], *(i for i in range(len(objects)) if i != modules[0])]


def _restored(
    optimizer: nnx.Optimizer[nnx.Module],
) -> Callable[[Parts, optax.GradientTransformation], nnx.Optimizer[nnx.Module]]:
    """Returns a function from parts and a transformation to an optimizer like this one."""
    # The arrays are replaced: keep their shapes, not their memory.
    graph, state = nnx.split(optimizer)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.as_pure(state))

    def restored(parts: Parts, tx: optax.GradientTransformation) -> nnx.Optimizer[nnx.Module]:
        closed = nnx.merge(graph, shapes)
        adopt(closed, parts, tx)
        return closed

    return restored


def _write_optimizer(
    optimizer: nnx.Optimizer[nnx.Module], parts: Parts, tx: optax.GradientTransformation
) -> None:
    """Writes the optimizer's arrays into its variables, or replaces the variables by others."""
    # Not nnx.update, which skips a value that it does not recognize as an array: one on disk.
    old, variables = bound_to(optimizer)
    leaves = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nnx.Variable))
    if old is not tx or len(leaves) != len(jax.tree.leaves(parts.opt_state)):
        return adopt(optimizer, parts, tx)
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


def adopt(
    optimizer: nnx.Optimizer[nnx.Module], parts: Parts, tx: optax.GradientTransformation
) -> None:
    """Replaces an optimizer's transformation and state."""
    bind(optimizer, tx, parts.opt_state)
    optimizer.step.set_value(parts.step)


def _object_variables(state: nnx.State[int, object], i: int) -> PyTree:
    """Returns the variables of one of several objects; a bare Variable is an array."""
    found = state.raw_mapping.get(i, {})
    return nnx.State(found) if isinstance(found, dict) else found


def _parameters(x: object, optimizer: nnx.Optimizer[nnx.Module]) -> list[object]:
    """Returns the variables that the optimizer would train; a bare Variable is not a model."""
    return [] if isinstance(x, nnx.Variable) else jax.tree.leaves(nnx.state(x, optimizer.wrt))


def _untrainable(objects: Sequence[PyTree], optimizer: nnx.Optimizer[nnx.Module]) -> TypeError:
    return TypeError(
        f"none of {', '.join(type(x).__name__ for x in objects) or 'the arguments'} has variables "
        f"for the optimizer (wrt={optimizer.wrt!r}). Pass the model too."
    )


def _fits(model: object, optimizer: nnx.Optimizer[nnx.Module]) -> bool:
    """Returns whether the optimizer's state has the shapes for this model."""
    expected = jax.eval_shape(optimizer.tx.init, nnx.as_pure(nnx.state(model, optimizer.wrt)))
    actual = nnx.as_pure(optimizer.opt_state)
    return [x.shape for x in jax.tree.leaves(expected)] == [
        x.shape for x in jax.tree.leaves(actual)
    ]
