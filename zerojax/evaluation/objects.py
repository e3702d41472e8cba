"""The parts of an evaluated function's state: a ``TrainState``, NNX objects or any pytree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jax
import optax
from jax.tree_util import PyTreeDef

from zerojax.placement.states import States
from zerojax.quantize import dequantize
from zerojax.step.call import RearrangedFunction
from zerojax.train_state.nnx import apply_settings, settings
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla.types import PyTree


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError(
        "zero.evaluate changes no state, and the function updates it (state.apply_gradients, or "
        "optimizer.update in NNX): decorate a step that trains with @zero."
    )


REFUSING = optax.GradientTransformationExtraArgs(_refuse, _refuse)
"""The optimizer that the function sees; each use raises TypeError."""


@dataclass(frozen=True)
class Subject:
    """The state, or the NNX objects, of a call.

    Attributes:
      opened: The state's arrays.
      call: ``call(function, parts, batch, *further)`` runs the function on such arrays, and
        returns the results, and the leaves of ``parts.rest`` that the function changed in place, in
        order, with None for the others.
      update: Writes the changed leaves to the user's objects.
    """

    opened: OpenedState
    call: Callable[..., tuple[PyTree, list[jax.Array | None]]]
    update: Callable[[Sequence[jax.Array | None]], None]


def subject_of(objects: tuple[PyTree, ...], states: States) -> Subject:
    """Splits the state of a call into its parts.

    Raises:
      TypeError: The NNX objects have no module, or a pytree has no arrays, or a leaf that is
        neither an array nor hashable.
    """
    opened = states.split_with_parameters(objects, read_only=True)
    if opened.kind.write_back is None:
        return _state_subject(opened)
    return _objects_subject(objects, opened)


def _state_subject(opened: OpenedState) -> Subject:
    close = opened.kind.close  # a program keeps `call`, which must not keep this state's arrays

    def call(
        function: RearrangedFunction, parts: Parts, batch: PyTree, *further: PyTree
    ) -> tuple[PyTree, list[jax.Array | None]]:
        objects = dequantize(close(parts, REFUSING))
        return function(*objects, batch, *further), []

    return Subject(opened, call, lambda changed: None)


def _objects_subject(objects: tuple[PyTree, ...], opened: OpenedState) -> Subject:
    """Returns the subject of NNX objects, whose variables the function may change, except for
    parameters."""
    kind = opened.kind  # without this state's arrays, as above

    def call(
        function: RearrangedFunction, parts: Parts, batch: PyTree, *further: PyTree
    ) -> tuple[PyTree, list[jax.Array | None]]:
        parts = dequantize(parts)
        call_objects = kind.close(parts, REFUSING)
        before = settings(call_objects)
        out = function(*call_objects, batch, *further)
        after = settings(call_objects)
        apply_settings(call_objects, {key: x for key, x in before.items() if after.get(key) != x})
        updated = kind.split(*call_objects)
        old_tree: PyTreeDef = jax.tree.structure(parts.rest)
        new_tree: PyTreeDef = jax.tree.structure(updated.rest)
        if old_tree != new_tree:
            raise TypeError(
                f"{function.__name__} adds or removes NNX variables: do so outside zero.evaluate."
            )
        _check_kept(parts.params, updated.params)
        pairs = zip(jax.tree.leaves(parts.rest), jax.tree.leaves(updated.rest), strict=True)
        # In a trace, a variable that the function has not set holds the same tracer.
        return out, [None if new is old else new for old, new in pairs]

    def update(changed: Sequence[jax.Array | None]) -> None:
        leaves, tree = jax.tree.flatten(opened.parts.rest)
        updated = [old if new is None else new for old, new in zip(leaves, changed, strict=True)]
        parts = opened.parts._replace(rest=jax.tree.unflatten(tree, updated))
        assert opened.kind.write_back is not None
        opened.kind.write_back(objects, parts, opened.tx)

    return Subject(opened, call, update)


def _check_kept(before: PyTree, after: PyTree) -> None:
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if new is not old:
            raise TypeError(
                "zero.evaluate changes no parameter, and the function sets "
                f"{jax.tree_util.keystr(path)}: decorate a step that trains with @zero."
            )
