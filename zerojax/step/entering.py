"""How arrays of a state enter a traced body, each from where the plan has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from zerojax.collectives import Inserter, Shard
from zerojax.plan.places import DEVICE
from zerojax.plan.plan import Leaf, layout


def entering(inserter: Inserter, values: Sequence[Any], leaves: Sequence[Leaf]) -> list[Any]:
    """What the inserter is given of a state's arrays.

    What is gathered once is gathered here: at stages 1 and 2 all, at stage 3 the small ones.

    Args:
      inserter: runs the body.
      values: arrays, or a :class:`zerojax.collectives.host.Fetchable` for what lies on disk.
      leaves: how they lie.
    """
    found: list[Any] = []
    for x, leaf in zip(values, leaves, strict=True):
        spec, away = layout.full(leaf.spec, len(leaf.shape)), leaf.place != DEVICE
        found.append(Shard(x, spec, host=away) if away or leaf.sharded else x)
    return [
        x if whole is None else dataclasses.replace(x, whole=whole)
        for x, whole in zip(found, inserter.in_advance(found), strict=True)
    ]
