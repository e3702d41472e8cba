"""Devices: as the command line names them, ``h100:8`` or ``v5e:16x16``, and those of a mesh."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zerojax.devices.rates import Rates, kind_of, rates, rates_of
from zerojax.devices.topology import topology, torus

_FORM = re.compile(r"([A-Za-z][\w-]*)(?::(\d+(?:x\d+)*))?")


def parse_devices(text: str) -> tuple[Mesh, Rates]:
    """The mesh and the rates of ``KIND:N``, or ``KIND:AxB`` for a torus of TPUs.

    Raises:
      ValueError: it is not of that form, the kind is unknown, or the number fills no whole hosts.
      ImportError: the compiler's wheels are not installed.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"devices {text!r}: give KIND:N, as h100:8 or v5e:16x16")
    sides = sorted(int(side) for side in (found[2] or "1").split("x"))
    number = math.prod(sides)
    speeds = rates(found[1])  # an unknown kind is told before a compiler is asked for
    if len(sides) > 1 and sides != sorted(shape := torus(speeds.kind, number)):
        wanted = "x".join(map(str, shape)) or "no torus"
        raise ValueError(f"devices {text!r}: {number} of them are compiled for as {wanted}")
    return topology(found[1], number), speeds


def rates_here(mesh: Mesh) -> Rates:
    """The rates of a mesh's devices, with what memory is free in those that are there.

    Raises:
      ValueError: nothing is known of their kind, as of CPUs.
    """
    device = mesh.devices.flat[0]
    if device in jax.devices() and (free := free_bytes(mesh)) is not None:
        return rates_of(device, free)
    if (kind := kind_of(device)) is not None:
        return rates(kind)
    raise ValueError(
        f"nothing is known of the speed and the memory of {device.device_kind!r} devices, by which "
        "settings are chosen: write them, or choose for devices that need not be there: "
        'zerojax.topology("h100", 8), or `python -m zerojax fit --devices h100:8`'
    )


def free_bytes(mesh: Mesh) -> int | None:
    """Bytes that are free in the fullest device of all processes; None where none can say."""
    found = []
    for device in mesh.local_devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            found.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    free = min(found, default=None)
    if jax.process_count() == 1:
        return free
    # All must come to the same end: where one raises, the others would wait for it.
    known = multihost_utils.process_allgather(np.float64(math.inf if free is None else free))
    return int(known.min()) if math.isfinite(known.min()) else None
