"""How fast each kind of device multiplies, reads, and sends: the figures of the roofline.

The peaks stand in ``device_kinds.json`` with their sources, and beside them the share of each
that programs reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from zerojax.devices.network import network_speed
from zerojax.devices.topology import device_kinds, lookup

RESERVE = 3 * 10**9 // 2
"""Bytes of a device's memory that no step gets: the driver's context, NCCL, the allocator."""


class Sent(NamedTuple):
    """What a device sends in one collective, by the link that the bytes cross.

    Attributes:
      inside: bytes to devices of its own node.
      between: bytes to other nodes.
      inside_steps, between_steps: steps, one after another, in which the collective crosses each.
      group: how many devices take part.
    """

    inside: float
    between: float
    inside_steps: int
    between_steps: int
    group: int


class Latency(NamedTuple):
    """Seconds of a collective beside those of its bytes.

    Attributes:
      start: once.
      doubling: for each doubling of the group.
      inside, between: for each step inside a node, and between nodes.
    """

    start: float
    doubling: float
    inside: float
    between: float

    def seconds(self, sent: Sent) -> float:
        steps = self.inside * sent.inside_steps + self.between * sent.between_steps
        return self.start + self.doubling * math.ceil(math.log2(sent.group)) + steps


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device reaches. Bytes and floating-point operations a second.

    Attributes:
      kind: as :func:`zerojax.topology` names it.
      memory: bytes of device memory.
      matrix: peak of matrix products by dtype, as HLO names it: "bf16", "f16", "f32".
      matrix_share, memory_share, link_share, host_share: what of the peaks programs reach.
      bandwidth: of device memory, peak.
      link: each way between devices of a node, peak, for each device.
      link_name: "NVLink", "PCIe" or "ICI".
      network: each way out of a node, peak, for each device.
      host: each way between a device and host memory, peak.
      disk: each way between host memory and disk, for a host's devices together.
      launch: seconds that a kernel costs beyond its work.
      latency: of a collective.
    """

    kind: str
    memory: int
    matrix: Mapping[str, float]
    bandwidth: float
    link: float
    link_name: str
    network: float
    host: float
    disk: float
    matrix_share: float
    memory_share: float
    link_share: float
    host_share: float
    launch: float
    latency: Latency

    @property
    def room(self) -> int:
        """Bytes of a device that a step may take."""
        return self.memory - RESERVE

    def compute_seconds(self, flops: Mapping[str, int], moved: int) -> float:
        """``max(sum flops / matrix rate, bytes / memory rate)`` + the launch."""
        slowest = min(self.matrix.values())
        busy = sum(n / self.matrix.get(dtype, slowest) for dtype, n in flops.items())
        wait = moved / (self.bandwidth * self.memory_share)
        return max(busy / self.matrix_share, wait) + self.launch

    def collective_seconds(self, sent: Sent) -> float:
        """``max((inside + between) / link, between / network)`` + latency.

        All that a device sends passes its link, and what leaves the node also the device's share of
        the network cards, which other groups share at the same time.
        """
        if sent.group < 2:
            return 0.0
        passed = max((sent.inside + sent.between) / self.link, sent.between / self.network)
        return passed / self.link_share + self.latency.seconds(sent)

    def over(self, network: str | None) -> Rates:
        """The rates with another network, as :func:`network_speed` knows it; None changes nothing.

        Raises:
          ValueError: The network is unknown.
        """
        return (
            self if network is None else dataclasses.replace(self, network=network_speed(network))
        )

    def host_seconds(self, moved: float) -> float:
        """Of a copy between device and pinned host memory."""
        return moved / (self.host * self.host_share)


def rates(kind: str) -> Rates:
    """The rates of a kind of device.

    Raises:
      ValueError: the kind is unknown.

    Example:
      >>> rates("h100").matrix["bf16"] / 1e12
      989.0
    """
    name, figures = lookup(kind)
    known = device_kinds()
    speeds = figures["rates"]
    return Rates(
        kind=name,
        memory=figures["device_memory_size"],
        bandwidth=float(figures["memory_bandwidth"]),
        **{
            key: known["common"][key]
            for key in (
                "matrix_share", "memory_share", "link_share", "host_share", "launch", "disk",
            )
        },
        latency=Latency(**known["latency"]["gpu" if name in known["gpu"] else "tpu"]),
        **speeds,
    )  # fmt: skip


def kind_of(device: jax.Device) -> str | None:
    """The kind of a device, there or not, by the name that it has; None for others and CPUs."""
    kinds = {**device_kinds()["gpu"], **device_kinds()["tpu"]}
    named = (kind for kind, figures in kinds.items() if figures["name"] == device.device_kind)
    return next(named, None)


def rates_of(device: jax.Device, room: int) -> Rates:
    """The rates of a device that exists, of which a step may take ``room`` bytes.

    One that is in no list counts as an A100: the order of two times may be right, the times are
    not.
    """
    return dataclasses.replace(rates(kind_of(device) or "a100"), memory=room + RESERVE)
