"""The work of a compiled program by its origin in the traced Python.

by_origin(parse(text), rates("h100"))["jit(step)/jvp(GPT)/h_0/mlp/c_fc/dot_general"].flops
"""

from __future__ import annotations

import dataclasses

from zerojax.devices.rates import Rates
from zerojax.hlo.program import HloProgram
from zerojax.hlo.traffic import KINDS
from zerojax.hlo.work import FREE, is_forward, products, work_of

# The ends of asynchronous operations, and copies between device and host.
_BESIDE = ("-done", "-update", "copy-start")


@dataclasses.dataclass
class OriginWork:
    """Work of one device in one run of a program.

    Attributes:
      flops: Floating-point operations of matrix products.
      forward: The part of them in the forward pass, without repetitions in the backward pass.
      seconds: The time by the roofline model of :mod:`zerojax.hlo.timeline`, without waits for
        transfers; 0 without rates.
    """

    flops: int = 0
    forward: int = 0
    seconds: float = 0.0

    def add(self, other: OriginWork, times: int = 1) -> None:
        """Adds other work, ``times`` times."""
        self.flops += times * other.flops
        self.forward += times * other.forward
        self.seconds += times * other.seconds


def by_origin(program: HloProgram, rates: Rates | None) -> dict[str, OriginWork]:
    """Returns the work of a program by ``op_name``; "" for instructions without a name.

    A loop counts as often as it runs (once if the trip count is unknown), a conditional counts with
    all of its branches. The seconds of a fusion count for the largest product in it.

    Args:
      program: The parsed program.
      rates: The speeds of the devices; None omits the seconds.
    """
    work: dict[str, OriginWork] = {}
    for computation, each, times, _ in program.walk():
        if each.opcode in FREE or each.operation in KINDS or each.opcode.endswith(_BESIDE):
            continue
        by_flops = sorted(products(program, computation, each), key=lambda product: product.flops)
        for product in by_flops:
            forward = product.flops if is_forward(product.op_name) else 0
            origin_work = OriginWork(product.flops, forward)
            work.setdefault(product.op_name, OriginWork()).add(origin_work, times)
        if rates is not None:
            origin_work = OriginWork(seconds=work_of(program, computation, each).seconds(rates))
            origin = by_flops[-1].op_name if by_flops else each.op_name
            work.setdefault(origin, OriginWork()).add(origin_work, times)
    return work
