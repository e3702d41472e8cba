"""Part 4: the kernels beside XLA, torch and Liger, and where they should be the default."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import kernels as benchmark
from benchmarks.gpu_day.measurement import attempts
from benchmarks.gpu_day.smoke import small
from benchmarks.kernel_peers import peers
from benchmarks.kernel_times import copy_rate
from pallas_kernels import dispatch
from pallas_kernels.arguments import Measured

MARGIN = 1.05
"""A kernel is proposed as the default where it wins by so much on every call."""
DISPATCH = 40e-6
"""Seconds: a shorter call takes the time in which the host starts it, whatever the kernel."""


def timed(kernels: Sequence[str], largest: int | None = None) -> Iterator[dict[str, Any]]:
    """The costs of the calls of some kernels, and a copy's rate in the same process."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too
    here = dispatch.target().platform == "gpu"
    yield from attempts({"copy": lambda: {"rate": copy_rate(2**28 if here else 2**16)}})
    for call in (small(each, largest) for each in benchmark.CALLS if each.kernel in kernels):
        named = f"{call.kernel}, {call.shape}"
        ways = {
            f"{named}, {name}": functools.partial(_cost, call, name)
            for name in benchmark.IMPLEMENTATIONS
        }
        yield from attempts(ways)
        if here:
            yield from attempts({f"{named}, torch and Liger": functools.partial(_peers, call)})


def _cost(call: Measured, implementation: str) -> dict[str, Any]:
    return {"costs": [dataclasses.asdict(benchmark.cost(call, implementation, 1, here=True))]}


def _peers(call: Measured) -> dict[str, Any]:
    found = [benchmark.peer(call, *each) for each in peers(call)]
    return {"costs": [dataclasses.asdict(each) for each in found]}


def costs(results: Iterable[Mapping[str, Any]]) -> tuple[list[benchmark.Cost], float | None]:
    """All costs of results of :func:`timed`, and the fastest copy."""
    found: list[benchmark.Cost] = []
    rates = []
    for result in results:
        for each in result.values():
            if isinstance(each, dict):
                found += [benchmark.Cost(**cost) for cost in each.get("costs", ())]
                rates += [each["rate"]] if "rate" in each else []
    return found, max(rates, default=None)


def faster(found: Iterable[benchmark.Cost], device: str) -> dict[str, tuple[str, ...]]:
    """``FASTER`` of ``pallas_kernels/measured.py`` as the costs would have it: the kernels that
    beat XLA by ``MARGIN`` on each of their calls that both take longer than ``DISPATCH``, on a
    device of this name."""
    ratios: dict[str, list[float]] = {}
    times = {(c.kernel, c.shape, c.implementation): c.seconds for c in found}
    for (kernel, shape, implementation), seconds in times.items():
        if implementation == "xla" and seconds:
            other = times.get((kernel, shape, "mosaic_gpu"))
            if not other or max(seconds, other) > DISPATCH:
                ratios.setdefault(kernel, []).append(seconds / other if other else 0.0)
    part = next((name for name in ("H100", "H200", "B200") if name in device), device)
    return {kernel: (part,) for kernel, each in ratios.items() if min(each) >= MARGIN}
