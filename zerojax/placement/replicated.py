"""Rejection of states with a copy for each device, as ``pmap`` takes them."""

from __future__ import annotations

import jax

from zerojax.xla import compat
from zerojax.xla.types import PyTree


def check_one_copy(state: PyTree, cause: Exception | None = None) -> None:
    """Rejects a state whose arrays have an entry for each device along the leading dimension.

    Args:
      state: A state, or all arguments of a step whose state is not known.
      cause: The error that the step raised for these arguments.

    Raises:
      ValueError: The state has such an array.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if n := compat.entries_by_device(x):
            raise ValueError(
                f"{jax.tree_util.keystr(path)} {x.shape} has an entry for each of {n} devices, as "
                "from flax.jax_utils.replicate or jax.pmap. Pass "
                "flax.jax_utils.unreplicate(state), and the batch as [rows, ...]."
            ) from cause
