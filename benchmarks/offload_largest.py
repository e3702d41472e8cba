"""The largest model that a device's memory trains, found by compiling a ladder of sizes.

The memory of scanned models is affine in depth and smooth in width, so between two sizes already
compiled it is interpolated to choose the next. All programs of the size that is named the largest
were compiled; the next size was compiled, too, or is ``CLEARLY`` above the memory by interpolation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.offload_programs import Costs, OffloadCase

HEAD = 128  # width of an attention head
CLEARLY = 1.15

# (width, layers): GPT-3's and Llama's sizes, and steps between.
LADDER = (
    (768, 12), (1024, 16), (1024, 24), (1280, 24), (1536, 24), (1792, 28), (2048, 24), (2048, 32),
    (2560, 32), (3072, 32), (3584, 32), (4096, 32), (4608, 36), (5120, 40), (5632, 44), (6144, 48),
    (6656, 60), (7168, 64), (8192, 64), (8192, 80), (9216, 80), (10240, 88), (11264, 96),
    (12288, 96), (14336, 96), (16384, 100), (18432, 104), (20480, 104),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Largest:
    """The outcome for one mode and one memory.

    Attributes:
      mode: the name of the table's row.
      memory: bytes of the device's memory.
      room: bytes of it that the step may take.
      costs: the costs of the largest size that fits; None where none does.
      above: bytes of the next size, by interpolation where ``compiled`` is False; None at the end
        of the ladder.
    """

    mode: str
    memory: int
    room: int
    costs: Costs | None
    above: int | None
    compiled: bool


def parameters(width: int, layers: int, vocab: int = 50304, block: int = 1024) -> int:
    """Number of parameters of the GPT of ``zerojax.models.gpt``."""
    return layers * (12 * width**2 + 13 * width) + (vocab + block + 2) * width


def rung(mode: OffloadCase, at: int, ladder: Sequence[tuple[int, int]] = LADDER) -> OffloadCase:
    """A mode with one of the ladder's sizes."""
    width, layers = ladder[at]
    return dataclasses.replace(
        mode, n_embd=width, n_layer=layers, n_head=max(1, width // HEAD), scan=True
    )


def search(
    room: int, sizes: Sequence[int], known: dict[int, int], measure: Callable[[int], int]
) -> tuple[int, int | None]:
    """The last of a ladder's sizes that fits in the memory.

    Args:
      room: bytes that may be taken.
      sizes: the ladder's sizes in parameters, rising.
      known: bytes by position on the ladder from earlier searches; those measured are added.
      measure: bytes of the size at a position, or at least more than ``room`` where it does not
        fit.

    Returns:
      The position, -1 where none fits, and the estimate by which the next was left out, if it was.
    """
    while True:
        low = max((at for at, size in known.items() if size <= room), default=-1)
        high = min((at for at, size in known.items() if size > room), default=len(sizes))
        if high - low <= 1:
            return low, None
        estimate = [_estimate(at, sizes, known) for at in range(len(sizes))]
        if low >= 0 and len(known) > 1 and estimate[low + 1] > CLEARLY * room:
            return low, round(estimate[low + 1])
        wanted = max((at for at, size in enumerate(estimate) if size <= room), default=0)
        at = min(max(wanted, low + 1), high - 1)
        known[at] = measure(at)


def _estimate(at: int, sizes: Sequence[int], known: Mapping[int, int]) -> float:
    """Bytes of a size by interpolation between the two known ones nearest to it."""
    near = sorted(known, key=lambda other: abs(other - at))[:2]
    if not near:
        return 16.0 * sizes[at]
    if len(near) == 1:
        return known[near[0]] * sizes[at] / sizes[near[0]]
    (x0, y0), (x1, y1) = ((math.log(sizes[i]), math.log(known[i])) for i in near)
    slope = min(max((y1 - y0) / (x1 - x0), 0.1), 1.2)
    return math.exp(y0 + slope * (math.log(sizes[at]) - x0))


def find_largest(
    modes: Mapping[str, OffloadCase],
    memories: Sequence[int],
    reserve: int,
    compiled: Callable[[OffloadCase, int], Costs],
    ladder: Sequence[tuple[int, int]] = LADDER,
) -> list[Largest]:
    """Searches the ladder for each mode and memory.

    Args:
      modes: cases by the name of the mode; their sizes do not matter.
      memories: bytes of device memory, one for each search.
      reserve: bytes of the memory that the step may not take.
      compiled: the costs of a case; programs after one that takes more than so many bytes may be
        missing.
    """
    outcomes = []
    sizes = [parameters(*size) for size in ladder]
    for name, mode in modes.items():
        costs: dict[int, Costs] = {}
        known: dict[int, int] = {}
        # The largest memory first: what was measured for it, in full, holds for the others.
        for memory in sorted(memories, reverse=True):
            room = memory - reserve
            measure = functools.partial(_measure, compiled, mode, ladder, room, costs)
            at, estimate = search(room, sizes, known, measure)
            above = known.get(at + 1, estimate)
            outcomes.append(
                Largest(name, memory, room, costs.get(at), above, compiled=at + 1 in known)
            )
    return outcomes


def _measure(
    compiled: Callable[[OffloadCase, int], Costs],
    mode: OffloadCase,
    ladder: Sequence[tuple[int, int]],
    room: int,
    costs: dict[int, Costs],
    at: int,
) -> int:
    costs[at] = compiled(rung(mode, at, ladder), room)
    return costs[at].peak.device_bytes
