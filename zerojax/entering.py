"""How arrays of a state enter a traced body, each from where the plan has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerojax.collectives import Inserter, Shard, layout
from zerojax.offload.places import DEVICE
from zerojax.plan import Leaf


def entering(inserter: Inserter, values: Sequence[Any], leaves: Sequence[Leaf]) -> list[Any]:
    """What the inserter is given of a state's arrays.

    Stages 1 and 2 gather here what they keep whole.

    Args:
      inserter: runs the body.
      values: arrays, or a :class:`zerojax.collectives.host.Source` for what lies on disk.
      leaves: how they lie.
    """
    found: list[Any] = []
    for x, leaf in zip(values, leaves, strict=True):
        spec = layout.full(leaf.spec, len(leaf.shape))
        if leaf.place != DEVICE:
            found.append(Shard(x, spec, host=True))
        elif leaf.sharded:
            found.append(Shard(x, spec, inserter.whole(x, spec) if inserter.keep else None))
        else:
            found.append(x)
    return found
