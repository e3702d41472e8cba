"""The GPUs of this machine and the CPUs next to them, found without JAX."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zerojax.launch.error import UsageError

_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
      name: Name in ``CUDA_VISIBLE_DEVICES``: a number, or an identifier.
      bus: Address on the PCI bus as sysfs writes it; "" if unknown.
    """

    name: str
    bus: str


def gpus(environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[Gpu]:
    """Returns the GPUs of ``CUDA_VISIBLE_DEVICES``, in its order; none under JAX_PLATFORMS=cpu.

    Raises:
      UsageError: ``CUDA_VISIBLE_DEVICES`` names a number that no GPU has.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    installed = _from_driver() or _from_proc(proc)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [Gpu(str(number), bus) for number, (_, bus) in enumerate(installed)]
    chosen = []
    for name in filter(None, map(str.strip, visible.split(","))):
        if name == "-1":
            break
        if name.isdigit() and int(name) >= len(installed):
            available = f"{socket.gethostname()} has {_count_text(len(installed))}"
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={visible}: {available}"
                + "; or set JAX_PLATFORMS=cpu" * (not installed)
            )
        buses = [bus for uuid, bus in installed if uuid and uuid.startswith(name)]
        bus = installed[int(name)][1] if name.isdigit() else (buses or [""])[0]
        chosen.append(Gpu(name, bus))
    return chosen


def _count_text(count: int) -> str:
    return "no GPU" if not count else f"{count} GPU" + "s" * (count > 1)


def _from_driver() -> list[tuple[str, str]]:
    """Returns identifier and bus address of every GPU, in the order of the bus."""
    try:
        completed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in completed.stdout.splitlines()]
    return [(row[1], row[2].lower()[-12:]) for row in rows if len(row) == 3 and row[0].isdigit()]


def _from_proc(proc: Path) -> list[tuple[str, str]]:
    return [("", each.name) for each in sorted((proc / "driver/nvidia/gpus").glob("*"))]


def near_cpus(gpu: Gpu | None, sys: Path = Path("/sys")) -> frozenset[int] | None:
    """Returns the CPUs of the NUMA node to which a GPU is attached; None if there are none."""
    if gpu is None or not gpu.bus:
        return None
    try:
        node = int((sys / "bus/pci/devices" / gpu.bus / "numa_node").read_text())
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):  # node -1: the GPU is next to no NUMA node
        return None
    return frozenset(numbers(text) & os.sched_getaffinity(0)) or None


def numbers(ranges: str) -> set[int]:
    """Returns the numbers in a list of ranges.

    Example:
      >>> sorted(numbers("0-2,8"))
      [0, 1, 2, 8]
    """
    ends = [re.split("-", part) for part in ranges.split(",") if part]
    return {number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)}
