"""Devices as the command line names them: ``h100:8``, ``v5e:16x16``."""

from __future__ import annotations

import math
import re

from jax.sharding import Mesh

from zerojax.foresight.rates import Rates, rates
from zerojax.topology import topology, torus

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
