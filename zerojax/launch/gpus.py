"""The GPUs of this machine and the CPUs next to them, found without JAX."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from zerojax.distributed.gpus import Gpu, installed_gpus, visible_gpus
from zerojax.launch.error import UsageError


def gpus(environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[Gpu]:
    """Returns the GPUs of ``CUDA_VISIBLE_DEVICES``, in its order; none under JAX_PLATFORMS=cpu.

    Raises:
      UsageError: ``CUDA_VISIBLE_DEVICES`` names a number that no GPU has.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    installed = installed_gpus()
    if not installed:
        buses = sorted(each.name for each in (proc / "driver/nvidia/gpus").glob("*"))
        installed = [Gpu(str(number), "", bus) for number, bus in enumerate(buses)]
    visible, count = environ.get("CUDA_VISIBLE_DEVICES", ""), len(installed)
    if any(name.isdigit() and int(name) >= count for name in re.split(r"\s*,\s*", visible.strip())):
        available = f"{count} GPU" + "s" * (count > 1) if count else "no GPU"
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible}: {socket.gethostname()} has {available}"
            + "; or set JAX_PLATFORMS=cpu" * (not count)
        )
    return visible_gpus(environ, installed)


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
