"""The bytes of a collective by link: inside a node, or over the network between nodes.

sent_by(collective, nodes_of(mesh)).between    # bytes of a device, in one run
"""

from __future__ import annotations

import collections
import functools
import math
from typing import NamedTuple

from zerojax.devices.rates import Sent
from zerojax.hlo.groups import Groups
from zerojax.hlo.traffic import Collective

_AT_ONCE = ("all-to-all", "ragged-all-to-all", "collective-permute")


class Layout(NamedTuple):
    """The distribution of a group over nodes.

    Attributes:
      members: The number of devices in the group.
      nodes: The number of nodes with devices of the group.
      fewest: The number of its devices on the node with the fewest.
    """

    members: int
    nodes: int
    fewest: int


def sent_by(collective: Collective, nodes: tuple[int, ...]) -> Sent:
    """Returns the bytes and steps of a device in one run of a collective, by link.

    Each of NCCL's rings leaves and enters each node once, and there are as many rings as the group
    has network cards on a node, one for each member. With n members, m of them on a node, a
    device sends (nccl-tests, PERFORMANCE.md, and NCCL's src/graph/tuning.cc):

    ==============  =============  ============  ==============  ============
    collective      bytes          between       steps inside    between
    ==============  =============  ============  ==============  ============
    gather, scatter (n-1)/n        1/m of them   n - nodes       nodes - 1
    all-reduce      2(n-1)/n       1/m of them   2(m-1)          2 log2 nodes
    all-to-all      (n-1)/n        (n-m)/n       1               1
    permute         1              1, or 0       1, or 0         0, or 1
    ==============  =============  ============  ==============  ============

    in units of the payload. The steps of an all-reduce are those of NCCL's trees. If groups differ
    in their distribution over nodes, the group that sends most between nodes counts.

    Args:
      collective: The collective.
      nodes: The node of each device of the program, from
        :func:`zerojax.devices.network.nodes_of`.
    """
    n, k, m = _layout(collective.groups, nodes)
    moved = collective.moved_bytes / max(collective.times, 1)
    if k == 1:
        between = 0.0
    elif collective.kind in _AT_ONCE:
        between = moved * (n - m) / (n - 1)
    else:
        between = moved / m
    if collective.kind in _AT_ONCE:
        steps = int(m > 1), int(k > 1)
    elif collective.kind == "all-reduce":
        steps = 2 * (m - 1), 2 * math.ceil(math.log2(k))
    else:
        steps = n - k, k - 1
    return Sent(moved - between, between, *steps, n)


@functools.lru_cache(maxsize=256)
def _layout(groups: Groups, nodes: tuple[int, ...]) -> Layout:
    """Returns the layout of the group that sends most between nodes."""
    layouts = set()
    for group in groups:
        counts = collections.Counter(nodes[device] for device in group)
        layouts.add(Layout(len(group), len(counts), min(counts.values())))
    return min(layouts, key=lambda each: (each.nodes == 1, each.fewest, -each.nodes))
