"""Devices by name, as ``h100:8``, and the free memory of existing devices."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zerojax.devices.mesh import mesh as all_devices
from zerojax.devices.rates import Rates, kind_of, rates, rates_of
from zerojax.devices.topology import topology

_FORM = re.compile(r"([A-Za-z][\w-]*)(?::(\d{1,9}))?")


HERE = "here"
"""The name of the existing devices."""


def parse_devices(text: str, network: str | None = None) -> tuple[Mesh, Rates]:
    """Returns the mesh and the rates of ``KIND:N`` or of ``here``; ``network`` is as for
    :meth:`Rates.over`.

    Raises:
      ValueError: The text has another form, the kind or the network is unknown, or the number of
        devices does not fill complete hosts.
      ImportError: The compiler's wheels are not installed.
    """
    if text == HERE:
        return (mesh := all_devices()), rates_here(mesh).over(network)
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"devices {text!r}: write KIND:N, such as h100:8")
    speeds = rates(match[1]).over(network)  # an unknown name raises before a missing compiler does
    return topology(match[1], int(match[2] or 1)), speeds


def rates_here(mesh: Mesh) -> Rates:
    """Returns the rates of a mesh's devices; for existing devices, the memory is the free memory.

    Raises:
      ValueError: The rates of the kind are not known, as for CPUs.
    """
    device = mesh.devices.flat[0]
    if device in jax.devices() and (free := free_bytes(mesh)) is not None:
        return rates_of(device, free)
    if (kind := kind_of(device)) is not None:
        return rates(kind)
    raise ValueError(f"{device.device_kind!r} devices have no known speed: use zerojax.topology()")


def free_bytes(mesh: Mesh) -> int | None:
    """Returns the free bytes of the fullest device of all processes; None if no device reports."""
    free_by_device = []
    for device in mesh.local_devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free_by_device.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    free = min(free_by_device, default=None)
    if jax.process_count() == 1:
        return free
    # All processes must decide the same: if only one raised, the others would wait for it.
    all_free = multihost_utils.process_allgather(np.float64(math.inf if free is None else free))
    return int(all_free.min()) if math.isfinite(all_free.min()) else None
