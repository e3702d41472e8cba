"""Speeds of each kind of device in arithmetic, memory and communication: the roofline's figures.

``device_kinds.json`` has the peaks with their sources, and the share of each peak that programs
reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax

from zerojax.devices.network import network_speed
from zerojax.devices.topology import device_kinds, lookup
from zerojax.xla.compiler import SCHEDULED, SLOP_FACTOR, Options

RESERVE = 3 * 10**9 // 2
"""Bytes of a device's memory that no step can use: the driver's context, NCCL, the allocator."""


class Sent(NamedTuple):
    """The bytes that a device sends in one collective, by the link that they cross.

    Attributes:
      inside: bytes to devices of the same node.
      between: bytes to other nodes.
      inside_steps, between_steps: number of successive steps over each kind of link.
      group: number of devices that take part.
    """

    inside: float
    between: float
    inside_steps: int
    between_steps: int
    group: int


class Latency(NamedTuple):
    """Seconds of a collective in addition to the transfer of its bytes.

    Attributes:
      start: seconds once per collective.
      doubling: seconds for each doubling of the group.
      inside, between: seconds for each step inside a node, and between nodes.
    """

    start: float
    doubling: float
    inside: float
    between: float

    def seconds(self, sent: Sent) -> float:
        steps = self.inside * sent.inside_steps + self.between * sent.between_steps
        return self.start + self.doubling * math.ceil(math.log2(sent.group)) + steps


class Links(NamedTuple):
    """The ways from a device to others.

    Attributes:
      name: "NVLink", "PCIe" or "ICI", between devices of a node.
      inside, between: peak each way for each device, inside a node and out of it.
      latency: latency of a collective.
    """

    name: str
    inside: float
    between: float
    latency: Latency


class Reached(NamedTuple):
    """The part of a device's peaks that programs reach.

    Attributes:
      shares: share of the peaks of "matrix" products, "memory", "link" and "host".
      attention: share of the matrix peak that kernels of attention reach, "forward" and "backward",
        by head width; a width between two takes the larger one's.
      nvlink: share of NVLink's peak that a kind of collective reaches; others reach that of "link".
      launch: seconds that a kernel costs beyond its work.
    """

    shares: Mapping[str, float]
    nvlink: Mapping[str, float]
    attention: Mapping[str, Mapping[str, float]]
    launch: float


class FusedAttention(NamedTuple):
    """The products inside one kernel of attention.

    Attributes:
      dtype: The operands' dtype, as HLO names it.
      width: The numbers of a head.
      is_backward: Whether the kernel computes gradients.
    """

    dtype: str
    width: int
    is_backward: bool


@dataclasses.dataclass(frozen=True)
class Rates:
    """The speeds of a device, in bytes and floating-point operations per second.

    Attributes:
      kind: name of the kind in :func:`zerojax.topology`.
      memory: bytes of device memory.
      matrix: peak of matrix products by dtype, as HLO names it: "bf16", "f16", "f32", "f8e4m3fn".
      bandwidth: peak of device memory.
      links: the links to other devices.
      host: peak each way between a device and host memory.
      disk: each way between host memory and disk, for a host's devices together.
      reached: the part of the peaks that programs reach.
    """

    kind: str
    memory: int
    matrix: Mapping[str, float]
    bandwidth: float
    links: Links
    host: float
    disk: float
    reached: Reached

    @property
    def room(self) -> int:
        """Bytes of device memory that a step may use."""
        return self.memory - RESERVE

    @property
    def peak(self) -> float:
        """The largest peak of matrix products but for those in fp8, of which MFU is a share."""
        return max(n for dtype, n in self.matrix.items() if not dtype.startswith("f8"))

    def compute_seconds(
        self,
        flops: Mapping[str, int],
        moved: int,
        attention: Mapping[FusedAttention, int] = MappingProxyType({}),
    ) -> float:
        """Returns ``max(sum flops / matrix rate, bytes / memory rate)`` + the launch.

        Args:
          flops: Floating-point operations of matrix products by dtype.
          moved: Bytes read from and written to device memory.
          attention: Floating-point operations of products inside kernels of attention.
        """
        slowest, shares = min(self.matrix.values()), self.reached.shares
        busy = sum(
            n / (self.matrix.get(dtype, slowest) * shares["matrix"]) for dtype, n in flops.items()
        )
        for each, n in attention.items():
            of_width = self.reached.attention["backward" if each.is_backward else "forward"]
            widths = sorted(map(int, of_width))
            width = next((w for w in widths if w >= each.width), widths[-1])
            busy += n / (self.matrix.get(each.dtype, slowest) * of_width[str(width)])
        return max(busy, moved / (self.bandwidth * shares["memory"])) + self.reached.launch

    def collective_seconds(self, sent: Sent, kind: str) -> float:
        """Returns ``max((inside + between) / link, between / network)`` + latency, for a kind of
        collective ("all-gather", ...).

        All bytes that a device sends pass its link, and bytes that leave the node also pass the
        device's share of the network cards, which other groups use at the same time.
        """
        if sent.group < 2:
            return 0.0
        links, reached = self.links, self.reached.shares["link"]
        is_nvlink = links.name == "NVLink"
        inside = self.reached.nvlink.get(kind, reached) if is_nvlink else reached
        passed = max(
            (sent.inside + sent.between) / (links.inside * inside),
            sent.between / (links.between * reached),
        )
        return passed + links.latency.seconds(sent)

    def over(self, network: str | None) -> Rates:
        """Returns the rates with another network, see :func:`network_speed`; None changes nothing.

        Raises:
          ValueError: The network is unknown.
        """
        if network is None:
            return self
        links = self.links._replace(between=network_speed(network))
        return dataclasses.replace(self, links=links)

    def host_seconds(self, moved: float) -> float:
        """Returns the seconds of a copy of ``moved`` bytes from or to pinned host memory."""
        return moved / (self.host * self.reached.shares["host"])


def rates(kind: str) -> Rates:
    """Returns the rates of a kind of device.

    Raises:
      ValueError: the kind is unknown.

    Example:
      >>> rates("h100").matrix["bf16"] / 1e12
      989.0
    """
    name, figures = lookup(kind)
    kinds = device_kinds()
    latency = Latency(**kinds["latency"]["gpu" if name in kinds["gpu"] else "tpu"])
    return Rates(
        kind=name,
        memory=figures["device_memory_size"],
        bandwidth=float(figures["memory_bandwidth"]),
        links=Links(**figures["links"], latency=latency),
        reached=Reached(**kinds["reached"]),
        **figures["rates"],
        **kinds["common"],
    )


def kinds_with(dtype: str) -> list[str]:
    """Returns the names of the kinds whose matrix units multiply a dtype, as HLO names it."""
    kinds = device_kinds()
    named = (kinds["gpu"] | kinds["tpu"]).items()
    return [name for name, figures in named if dtype in figures["rates"]["matrix"]]


def kind_of(device: jax.Device) -> str | None:
    """Returns the kind of a device, existing or absent, by its name; None for CPUs and others."""
    kinds = {**device_kinds()["gpu"], **device_kinds()["tpu"]}
    named = (kind for kind, figures in kinds.items() if figures["name"] == device.device_kind)
    return next(named, None)


def rates_of(device: jax.Device, room: int) -> Rates:
    """Returns the rates of an existing device, of which a step may use ``room`` bytes.

    A device that is not in the list counts as an A100: the order of two times may be right, the
    times are not.
    """
    return dataclasses.replace(rates(kind_of(device) or "a100"), memory=room + RESERVE)


def memory_options(device: jax.Device, arguments: int) -> Options:
    """Returns XLA's option to use a device's whole room before it saves memory; none if unknown.

    A GPT of 30B on 8 H100s, 24 rows of 2048 tokens, needs 69 GB of 85: under XLA's own limit it
    hides 6% of its gathers and takes 2.55 s by forecast, under this one 100% and 2.14 s.

    Args:
      device: The device, existing or absent.
      arguments: Bytes of a program's arguments on it. If they exceed XLA's share of the memory, no
        option moves the limit.

    Example:
      >>> memory_options(jax.devices("cpu")[0], 4_000_000_000)
      {}
    """
    kind = kind_of(device)
    if kind is None:
        return {}
    known = rates(kind)
    beside = SCHEDULED * known.memory - arguments
    return {SLOP_FACTOR: int(100 * (known.room - arguments) / beside)} if beside > 0 else {}
