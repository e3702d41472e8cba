"""The bytes of a layer in a loop over layers, for an option of XLA, before the step is traced.

XLA combines collectives up to a number of bytes, an option that is set when the step is created.
Before the trace only their shapes show that parameters are stacked: all leaves below one node of
their tree have the same first dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from zerojax.collectives.ahead import LEAST
from zerojax.devices.mesh import micro_batch_devices
from zerojax.plan.state_sharding import Leaf, Plan

ROWS = 2**20
"""The fewest bytes of a layer: a smaller slice is taken for a row of a matrix."""


def layer_bytes(plan: Plan, *, backward: bool = True) -> int:
    """Returns the bytes of the largest layer of stacked parameters, in their compute dtypes; 0 if
    loops neither gather a layer ahead nor reduce a layer's gradients one iteration later.

    Args:
      plan: The plan of the state.
      backward: Whether there are gradients.
    """
    config = plan.config
    if config.overlap_comm is False:
        return 0
    accumulates = config.batch(micro_batch_devices(plan.mesh)).accumulation > 1
    defers = backward and not (config.stage == 1 and accumulates)  # there each device sums locally
    if config.stage < 3 and not defers:
        return 0
    paths = jax.tree.leaves_with_path(plan.params, is_leaf=lambda x: isinstance(x, PartitionSpec))
    named = [(path, leaf) for (path, _), leaf in zip(paths, plan.compute, strict=True)]
    if not defers:
        named = [(path, leaf) for path, leaf in named if leaf.path not in plan.live.paths]
    largest = _largest(named, 0)
    return largest if largest >= ROWS else 0


def _largest(named: Sequence[tuple[tuple[object, ...], Leaf]], depth: int) -> int:
    """Returns the bytes of the largest layer among the leaves below a node, whose paths are equal
    up to ``depth``."""
    first_sizes = {leaf.shape[:1] for _, leaf in named}
    length = next(iter(first_sizes)) if len(first_sizes) == 1 else ()
    if length and length[0] >= LEAST:
        return sum(leaf.bytes for _, leaf in named if leaf.sharded) // length[0]
    deeper = [(path, leaf) for path, leaf in named if len(path) > depth]
    groups = itertools.groupby(deeper, key=lambda each: str(each[0][depth]))
    return max((_largest(list(group), depth + 1) for _, group in groups), default=0)
