"""Checks of what a user passes for a state: the function that creates it, the specs of its
parameters, its optimizer, and its arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax
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


def check_keys_of_specs(specs: PyTree, params: PyTree) -> None:
    """Raises ValueError unless specs have the keys of the parameters, or of their subtrees."""
    given, known = (
        [keystr(path) for path, _ in tree_leaves_with_path(tree, is_leaf=is_spec)]
        for tree in (specs, params)
    )
    unknown = [key for key in given if key and not any(path.startswith(key) for path in known)]
    absent = [path for path in known if not any(path.startswith(key) for key in given)]
    if unknown or absent:
        listing = [f"{key} is not a parameter" for key in unknown[:2]]
        listing += [f"{path} has no entry" for path in absent[:2]]
        raise ValueError(
            f"zerojax.zero(specs=...): {', '.join(listing)}. Write an entry for each parameter or "
            "subtree of parameters: a PartitionSpec, or None to leave it to ZeRO."
        )


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
