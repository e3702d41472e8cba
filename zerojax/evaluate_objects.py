"""What an evaluated function is given: a ``TrainState``, or NNX objects, taken apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from zerojax.linen import open_state
from zerojax.nnx import adopt, open_pair, own_specs
from zerojax.parts import Opened, Parts


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "zero.evaluate changes nothing, but the function updates (state.apply_gradients, or "
        "optimizer.update in NNX): decorate a step that trains with @zero."
    )


REFUSING = optax.GradientTransformationExtraArgs(_refuse, _refuse)
"""The optimizer that the function sees."""


class Given(NamedTuple):
    """The arguments of one call.

    Attributes:
      objects: the state, or the NNX objects, in order.
      batch: the first positional argument that is none of those.
      args, kwargs: all others.
      at: positions of NNX objects among the positional arguments, and their names among the
        others; None with a ``TrainState``.
    """

    objects: tuple[Any, ...]
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: tuple[int | str, ...] | None = None


def given(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Sorts the arguments of a call.

    Raises:
      TypeError: there is no batch, or no model among NNX objects.
    """
    positional = [i for i, x in enumerate(args) if _is_nnx(x)]
    named = [name for name, x in kwargs.items() if _is_nnx(x)]
    if not positional and not named:
        if len(args) < 2:
            bound = inspect.signature(function).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if len(args) < 2:
            raise TypeError(_no_batch(function, len(args)))
        return Given(args[:1], args[1], args[2:], kwargs)
    others = [x for x in args if not _is_nnx(x)]
    left = {name: x for name, x in kwargs.items() if not _is_nnx(x)}
    if not others and "batch" in left:
        bound = inspect.signature(function).bind(*args, **kwargs)
        return given(function, bound.args, bound.kwargs)
    if not others:
        raise TypeError(_no_batch(function, len(args)))
    objects = (*(args[i] for i in positional), *(kwargs[name] for name in named))
    return Given(objects, others[0], tuple(others[1:]), left, (*positional, *named))


def _is_nnx(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _no_batch(function: Any, n: int) -> str:
    return (
        f"{getattr(function, '__name__', 'the function')} takes (state, batch, ...) or "
        f"(model, batch, ...) under zero.evaluate, but was called with {n} arguments."
    )


@dataclass(frozen=True)
class Subject:
    """The state, or the NNX objects, of a call.

    Attributes:
      opened: their arrays; ``close`` is not to be used.
      call: ``call(function, parts, batch, args, kwargs)`` runs the function on such arrays. It
        returns the results, and the leaves of ``parts.rest`` that the function changed in place, in
        order, with None for the others.
      update: gives the user's objects the changed leaves.
      key: what tells two kinds of them apart, hashable.
    """

    opened: Opened
    call: Callable[..., tuple[Any, list[Any]]]
    update: Callable[[Sequence[Any]], None]
    key: Any


def subject(given: Given) -> Subject:
    """Takes the state of a call apart.

    Raises:
      TypeError: it is no ``TrainState``, and no NNX module is among the objects.
    """
    return _of_state(given.objects[0]) if given.at is None else _of_objects(given)


def _of_state(state: Any) -> Subject:
    opened = open_state(state)

    def call(function: Any, parts: Parts, batch: Any, args: Any, kwargs: Any) -> Any:
        return function(opened.close(parts, REFUSING), batch, *args, **kwargs), []

    return Subject(opened, call, lambda changed: None, opened.key)


def _of_objects(given: Given) -> Subject:
    assert given.at is not None
    optimizers = [x for x in given.objects if isinstance(x, nnx.Optimizer)]
    others = [x for x in given.objects if not isinstance(x, nnx.Optimizer)]
    models = [x for x in others if isinstance(x, nnx.Module)]
    if not models or len(optimizers) > 1:
        raise TypeError(
            "zero.evaluate takes one nnx.Module first, and at the most one nnx.Optimizer, among "
            f"its NNX objects, not {', '.join(type(x).__name__ for x in given.objects)}."
        )
    model = models[0]
    graph_of_objects = (model, *(x for x in others if x is not model))
    optimizer = optimizers[0] if optimizers else None
    wrt = nnx.Param if optimizer is None else optimizer.wrt
    is_param = nnx.filterlib.to_predicate(wrt)

    def split(objects: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        first = lambda path, x: path[0] == 0 and is_param(path[1:], x)  # noqa: E731
        graph, params, rest = nnx.split(objects, first, ...)
        return graph, nnx.as_pure(params), nnx.as_pure(rest)

    graph, params, rest = split(graph_of_objects)
    specs: tuple[Any, ...] = ()
    if optimizer is None:
        base = Parts((), optax.EmptyState(), np.zeros((), np.int32), {})
        kind: Any = None
        specs = own_specs(nnx.state(model, wrt))
        tx: Any = optax.identity()
    else:
        pair = open_pair(model, optimizer)
        base, tx, specs, kind = pair.parts, pair.tx, pair.specs, type(optimizer)
        optimizer_graph, optimizer_state = nnx.split(optimizer)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.as_pure(optimizer_state)
        )
    parts = base._replace(params=params[0] if params else {}, rest={"objects": rest})

    def call(function: Any, parts: Parts, batch: Any, args: Any, kwargs: Any) -> Any:
        mine = nnx.merge(graph, type(params)({0: parts.params}), parts.rest["objects"])
        by_id = {id(old): new for old, new in zip(graph_of_objects, mine, strict=True)}
        if optimizer is not None:
            closed = nnx.merge(optimizer_graph, shapes)
            adopt(closed, parts, REFUSING)
            by_id[id(optimizer)] = closed
        objects = dict(zip(given.at or (), (by_id[id(x)] for x in given.objects), strict=True))
        left = iter((batch, *args))
        n = sum(isinstance(at, int) for at in objects) + 1 + len(args)
        positional = [objects[i] if i in objects else next(left) for i in range(n)]
        named = {at: x for at, x in objects.items() if isinstance(at, str)}
        out = function(*positional, **named, **kwargs)
        made, new_params, new_rest = split(mine)
        if made != graph:
            raise TypeError(
                f"{getattr(function, '__name__', 'the function')} changes the structure of its NNX "
                "objects, such as a variable that sow makes or what model.eval() sets: do that "
                "outside zero.evaluate."
            )
        _check_kept(parts.params, new_params[0] if new_params else {})
        pairs = zip(jax.tree.leaves(parts.rest), jax.tree.leaves(new_rest), strict=True)
        return out, [None if new is old else new for old, new in pairs]

    def update(changed: Sequence[Any]) -> None:
        leaves, tree = jax.tree.flatten(rest)
        found = [old if new is None else new for old, new in zip(leaves, changed, strict=True)]
        nnx.update(graph_of_objects, jax.tree.unflatten(tree, found))

    opened = Opened(parts, tx, split, lambda *_: None, graph, specs)
    order = tuple(next(i for i, y in enumerate((*graph_of_objects, optimizer)) if y is x)
                  for x in given.objects)  # fmt: skip
    return Subject(opened, call, update, (graph, kind, given.at, order))


def _check_kept(before: Any, after: Any) -> None:
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if new is not old:
            raise TypeError(
                f"zero.evaluate changes no parameter, but the function sets "
                f"{jax.tree_util.keystr(path)}: decorate a step that trains with @zero."
            )
