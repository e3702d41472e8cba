"""Nodes, and the speed of the network between them.

nodes_of(zerojax.topology("h100", devices=16))    # (0, 0, 0, 0, 0, 0, 0, 0, 1, ...)
network_speed("400gb")                            # 5e10 bytes a second
"""

from __future__ import annotations

import functools
import re
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.devices.topology import GPUS_PER_HOST, device_kinds

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([gt])b(?:it)?(?:ps|/s)?(/host)?", re.IGNORECASE)
_BITS = {"g": 1e9, "t": 1e12}


def nodes_of(mesh: Mesh) -> tuple[int, ...]:
    """Returns the node of each device of a mesh, in the order of the program's device numbers.

    A node is a group of devices that fast links join: a host's GPUs (or those of several hosts that
    NVLink joins), a slice of TPUs.
    """
    return tuple(map(_node, mesh.devices.flat))


@functools.cache
def near(mesh: Mesh, axis: str) -> int:
    """Returns how many neighbouring devices on an axis share a node; 1 if that number varies."""
    nodes = np.reshape(nodes_of(mesh), mesh.devices.shape)
    lines = np.moveaxis(nodes, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    count = int(np.sum(lines[0] == lines[0, 0]))
    blocks = lines.reshape(len(lines), -1, count) if lines.shape[1] % count == 0 else None
    alike = blocks is not None and bool((blocks == blocks[:, :, :1]).all())
    return count if alike else 1


def _node(device: jax.Device) -> int:
    # All absent GPUs are in one slice; their hosts are processes.
    absent = device.platform == "gpu" and device not in jax.devices()
    return cast(
        int,
        device.process_index if absent else getattr(device, "slice_index", device.process_index),
    )


def network_speed(text: str) -> float:
    """Returns bytes per second, each way, of a device's share of its host's network cards.

    Args:
      text: Gigabits per second for each device (``"400gb"``) or for a host of eight devices
        (``"3.2tb/host"``), or a network of ``device_kinds.json`` (``"ib-ndr"``).

    Raises:
      ValueError: The text has another form, or the network is unknown.

    Example:
      >>> network_speed("400gb"), network_speed("3.2tb/host"), network_speed("a3-mega")
      (50000000000.0, 50000000000.0, 25000000000.0)
    """
    networks = device_kinds()["networks"]
    if text.lower() in networks:
        return float(networks[text.lower()]["speed"])
    form = _FORM.fullmatch(text)
    if form is None or "B" in text or not float(form[1]):
        raise ValueError(f"network {text!r}: write 400gb, 3.2tb/host, or {', '.join(networks)}")
    return float(form[1]) * _BITS[form[2].lower()] / 8 / (GPUS_PER_HOST if form[3] else 1)
