"""The stacks of layers among a state's parameters, which pipeline stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import jax

from zerojax.devices.mesh import STAGE
from zerojax.plan.layout import Spec
from zerojax.xla.types import PyTree


def with_stages(params: PyTree, specs: Sequence[Spec], stages: int) -> list[Spec]:
    """Adds the axis "stage" to the specs of stacks of layers.

    A stack is a subtree whose arrays all have the same first dimension, the number of layers, and
    of which one is a stack of matrices, [layers, m, n].

    Args:
      params: The parameters.
      specs: The user's spec of each array, one entry a dimension.
      stages: Devices along "stage".
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    stacked = _stacked([path for path, _ in leaves], [tuple(x.shape) for _, x in leaves])
    return [
        ((STAGE, *spec[1:]) if is_stack and spec[0] is None and x.shape[0] % stages == 0 else spec)
        for spec, is_stack, (_, x) in zip(specs, stacked, leaves, strict=True)
    ]


def _stacked(paths: Sequence[tuple[object, ...]], shapes: Sequence[tuple[int, ...]]) -> list[bool]:
    """Returns for each array whether it belongs to a stack of layers."""
    subtrees: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, path in enumerate(paths):
        for depth in range(len(path) + 1):
            subtrees[path[:depth]].append(i)
    stacked = [False] * len(paths)
    for members in subtrees.values():
        firsts = {shapes[i][:1] for i in members}
        if len(firsts) == 1 and firsts != {()} and max(len(shapes[i]) for i in members) > 2:
            for i in members:
                stacked[i] = True
    return stacked
