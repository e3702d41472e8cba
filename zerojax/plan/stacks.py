"""The stacks of layers among a state's parameters, which pipeline stages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax

from zerojax.devices.mesh import STAGE
from zerojax.plan.layout import Spec
from zerojax.xla.types import PyTree, Shaped


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
    found = stacks([path for path, _ in leaves], [tuple(x.shape) for _, x in leaves])
    stacked = {i for members in found for i in members}
    return [
        ((STAGE, *spec[1:]) if i in stacked and spec[0] is None and n % stages == 0 else spec)
        for i, (spec, n) in enumerate(zip(specs, (_length(x) for _, x in leaves), strict=True))
    ]


def _length(x: Shaped) -> int:
    return x.shape[0] if x.shape else 0


def stacks(
    paths: Sequence[tuple[object, ...]], shapes: Sequence[tuple[int, ...]]
) -> Iterator[list[int]]:
    """Yields the positions of the arrays of each stack of layers, stacks inside it included."""
    subtrees: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, path in enumerate(paths):
        for depth in range(len(path) + 1):
            subtrees[path[:depth]].append(i)
    for members in subtrees.values():
        firsts = {shapes[i][:1] for i in members}
        if len(firsts) == 1 and firsts != {()} and max(len(shapes[i]) for i in members) > 2:
            yield members
