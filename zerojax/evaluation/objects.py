"""The parts of an evaluated function's state: a ``TrainState``, NNX objects or any pytree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import jax
import optax
from jax.tree_util import PyTreeDef

from zerojax.quantize import dequantize
from zerojax.step.call import RearrangedFunction
from zerojax.train_state.nnx import apply_settings, settings
from zerojax.train_state.state_parts import OpenedState, Parts, StateKind
from zerojax.xla.types import PyTree


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError(
        "zero.evaluate changes no state, and the function updates it (state.apply_gradients, or "
        "optimizer.update in NNX): decorate a step that trains with @zero."
    )


REFUSING = optax.GradientTransformationExtraArgs(_refuse, _refuse)
"""The optimizer that the function sees; each use raises TypeError."""


def call(
    kind: StateKind, function: RearrangedFunction, parts: Parts, batch: PyTree, *further: PyTree
) -> tuple[PyTree, list[jax.Array | None]]:
    """Runs a function on the arrays of a state.

    Returns:
      The results, and the leaves of ``parts.rest`` that the function changed in place, in order,
      with None for the others: of NNX objects, whose variables may change, except for parameters.

    Raises:
      TypeError: The function sets a parameter, or adds or removes variables.
    """
    if kind.write_back is None:
        return function(*dequantize(kind.close(parts, REFUSING)), batch, *further), []
    parts = dequantize(parts)
    objects = kind.close(parts, REFUSING)
    before = settings(objects)
    out = function(*objects, batch, *further)
    after = settings(objects)
    apply_settings(objects, {key: x for key, x in before.items() if after.get(key) != x})
    updated = kind.split(*objects)
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


def update(
    objects: tuple[PyTree, ...], opened: OpenedState, changed: Sequence[jax.Array | None]
) -> None:
    """Writes the changed leaves, as :func:`call` returns them, to the user's objects."""
    if opened.kind.write_back is None or not any(x is not None for x in changed):
        return
    parts = opened.kind.split(*objects)
    leaves, tree = jax.tree.flatten(parts.rest)
    updated = [old if new is None else new for old, new in zip(leaves, changed, strict=True)]
    parts = parts._replace(rest=jax.tree.unflatten(tree, updated))
    opened.kind.write_back(objects, parts, opened.tx)


def _check_kept(before: PyTree, after: PyTree) -> None:
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if new is not old:
            raise TypeError(
                "zero.evaluate changes no parameter, and the function sets "
                f"{jax.tree_util.keystr(path)}: decorate a step that trains with @zero."
            )
