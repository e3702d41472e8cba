"""The entry of a state's arrays into a step: as they are stored, or gathered once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zerojax.collectives import Inserter, Shard
from zerojax.collectives.host import unpadded
from zerojax.collectives.shard import Gathering
from zerojax.offload.disk.params import DiskParam, ParamReader
from zerojax.plan import layout
from zerojax.plan.places import DEVICE, DISK
from zerojax.plan.plan import Leaf, Plan


def enter(
    inserter: Inserter,
    plan: Plan,
    leaves: Sequence[Leaf],
    values: Sequence[Any],
    reader: ParamReader | None = None,
    *,
    by_partition: bool = True,
) -> list[Any]:
    """Returns what the inserter is given of a state's arrays, each from where the plan has it.

    What is gathered once is gathered here: at stages 1 and 2 everything, at stage 3 small arrays,
    those that stay gathered over an update, and secondary shards (hpZ).

    Args:
      inserter: Runs the body.
      plan: PartitionSpec and place of every leaf.
      leaves: The arrays' leaves in the plan.
      values: The arrays. None for one that lies on disk, and for one that the body does not use.
      reader: Reads arrays from the disk, by their position in ``leaves``.
      by_partition: Whether they have secondary shards (hpZ).
    """
    entered: list[Any] = []
    quantized = plan.quantized.paths
    for i, (x, leaf) in enumerate(zip(values, leaves, strict=True)):
        spec, away = layout.full(leaf.spec, len(leaf.shape)), leaf.place != DEVICE
        if leaf.place == DISK:
            assert reader is not None
            x = DiskParam(reader, i, leaf.padded, leaf.dtype, plan.sharding(leaf))
        if away and x is not None:
            x = unpadded(x, leaf.shape)
        few = leaf.path in quantized
        cut = away or (leaf.sharded and x is not None)
        secondary = None
        if by_partition and not away and not inserter.share:
            secondary = plan.secondary_spec(leaf)
        if secondary is not None and x is not None:
            x = inserter.secondary(x, spec, secondary, quantized=few)
            spec = secondary
        how = Gathering(host=away, quantized=few)
        entered.append(Shard(x, spec, gathering=how) if cut else x)
    stay = plan.live.paths if not inserter.share else ()  # where one gather serves all uses anyway
    live = [i for i, leaf in enumerate(leaves) if leaf.path in stay]
    return [
        x if whole is None else x.with_copy(whole)
        for x, whole in zip(entered, inserter.in_advance(entered, live), strict=True)
    ]


def enter_rest(inserter: Inserter, plan: Plan, rest: Mapping[str, Any]) -> list[Any]:
    """Returns the same of the state beside the parameters, in its order.

    Small arrays are gathered field by field: those of a field that is not used whole, an average
    for one, are not gathered.
    """
    entered: list[Any] = []
    for _, field in sorted(rest.items()):
        values, first = jax.tree.leaves(field), len(entered)
        leaves = plan.leaves["rest"][first : first + len(values)]
        entered += enter(inserter, plan, leaves, values, by_partition=False)
    return entered
