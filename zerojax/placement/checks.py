"""Checks of what a user passes for a state: the function that creates it, the specs of its
parameters, its optimizer, and its arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from zerojax.optim.wrap import ZeroOptState
from zerojax.xla import compat
from zerojax.xla.types import PyTree


def check_arguments(create: Callable[..., PyTree], args: tuple[PyTree, ...]) -> None:
    """Raises TypeError unless the function that creates a state can be called so."""
    try:
        inspect.signature(create).bind(*args)
    except ValueError:  # a callable without a signature
        return
    except TypeError as error:
        name = getattr(create, "__name__", type(create).__name__)
        raise TypeError(
            f"zero.init and zero.abstract_state call {name} with the {len(args)} arguments after "
            f"it ({error}). Write zero.init({name}, key)."
        ) from None


def specs_by_key(specs: PyTree, params: PyTree, remedy: str = "") -> list[PartitionSpec | None]:
    """Returns the spec of each parameter: that of its keys, or of a subtree which it is in.

    Args:
      specs, params: Their trees.
      remedy: A further sentence for the error.

    Raises:
      ValueError: Specs have other keys than the parameters and their subtrees, or shard dimensions
        that a parameter lacks.
    """
    given, known = (
        {tuple(keystr((key,)) for key in path): x for path, x in leaves}
        for leaves in (tree_leaves_with_path(tree, is_leaf=is_spec) for tree in (specs, params))
    )
    subtrees = {(), *(path[:i] for path in known for i in range(len(path) + 1))}
    found = {
        path: [key for i in range(len(path) + 1) if (key := path[:i]) in given] for path in known
    }
    unknown = [key for key in given if key not in subtrees]
    absent = [path for path in known if not found[path]]
    short = [
        key for key in given if key in known and any((given[key] or ())[np.ndim(known[key]) :])
    ]
    if unknown or absent or short:
        listing = [f"{''.join(key)} is not a parameter" for key in unknown[:2]]
        listing += [f"{''.join(path)} has no entry" for path in absent[:2]]
        listing += [
            f"{''.join(key)} has only {np.ndim(known[key])} dimensions" for key in short[:2]
        ]
        raise ValueError(
            f"zerojax.zero(specs=...): {', '.join(listing)}. Write an entry for each parameter or "
            f"subtree of parameters: a PartitionSpec, or None to leave it to ZeRO.{remedy}"
        )
    return [given[found[path][-1]] for path, x in known.items() if x is not None]


def is_spec(x: object) -> bool:
    """Returns whether a value is the spec of an array; None leaves the array to ZeRO."""
    return x is None or isinstance(x, PartitionSpec)


def check_not_within(opt_state: PyTree) -> None:
    """Raises ValueError if an optimizer state has one of a wrapped optimizer within it."""

    def is_wrapped(x: object) -> bool:
        return isinstance(x, ZeroOptState)

    if any(map(is_wrapped, jax.tree.leaves(opt_state, is_leaf=is_wrapped))):
        raise ValueError(
            "the state's optimizer contains one of zero.optimizer() or zero.wrap(), and would "
            "clip and unscale twice. Wrap only the outermost transformation."
        )


def check_one_copy(state: PyTree, cause: Exception | None = None) -> None:
    """Rejects a state whose arrays have an entry for each device along the leading dimension, as
    ``pmap`` takes them.

    Args:
      state: A state, or all arguments of a step whose state is not known.
      cause: The error that the step raised for these arguments.

    Raises:
      ValueError: The state has such an array.
    """
    for path, x in tree_leaves_with_path(state):
        if n := compat.entries_by_device(x):
            raise ValueError(
                f"{keystr(path)} {x.shape} has an entry for each of {n} devices, as "
                "from flax.jax_utils.replicate or jax.pmap. Pass "
                "flax.jax_utils.unreplicate(state), and the batch as [rows, ...]."
            ) from cause
