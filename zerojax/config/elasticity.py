"""One batch size that many numbers of devices share, as DeepSpeed's elasticity computes it."""

import math
from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

from zerojax.config.batch import BatchSizes
from zerojax.config.errors import ConfigError

_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040),
    *(7560, 10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320),
    *(221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
"""Numbers with more divisors than any smaller one, as far as DeepSpeed knows them."""


class ElasticBatch(NamedTuple):
    """A batch and the numbers of devices that share it.

    Attributes:
      train: Rows per update, over all devices.
      devices: The numbers of data-parallel devices that may run it, rising.
    """

    train: int
    devices: tuple[int, ...]

    def sizes(self, micros: Sequence[int], world: int) -> BatchSizes:
        """The batch sizes on `world` devices, with the largest micro-batch that divides.

        Raises:
          ConfigError: The batch is not for so many devices; the message names the nearest numbers.

        Example:
          >>> ElasticBatch(48, (4, 6, 8, 12)).sizes([1, 2, 4], world=6)
          BatchSizes(train=48, micro=4, accumulation=2)
        """
        if world not in self.devices:
            place = bisect(self.devices, world)
            near = " or ".join(map(str, self.devices[max(0, place - 1) : place + 1]))
            raise ConfigError(
                f"elasticity: a batch of {self.train} rows is not for {world} data-parallel "
                f"device{'s' * (world != 1)}; take {near}, as zerojax.mesh(n) does, or change "
                "elasticity.micro_batch_sizes, min_gpus or max_gpus"
            )
        rows = self.train // world
        micro = max(micro for micro in micros if rows % micro == 0)
        return BatchSizes(self.train, micro, rows // micro)

    def listed(self) -> str:
        """The numbers of devices in words, the first and the last of many.

        Example:
          >>> ElasticBatch(48, (4, 6, 8, 12)).listed()
          '4, 6, 8, 12'
        """
        words = [str(number) for number in self.devices]
        if len(words) > 16:
            words[12:-1] = ["..."]
        return ", ".join(words)


def elastic_batch(
    largest: int, micros: Sequence[int], fewest: int, most: int, prefer_larger: bool
) -> ElasticBatch:
    """The batch that the most numbers of devices share.

    Candidates are multiples of each micro-batch, and of their least common multiple, by the largest
    highly composite number that `largest` allows.

    Args:
      largest: The most rows, not less than any micro-batch.
      micros: The rows that a device may have in one micro-batch.
      fewest, most: The range of the numbers of devices.
      prefer_larger: Whether the larger of two candidates that as many numbers share is taken.

    Example:
      >>> elastic_batch(50, [2, 4], 1, 12, prefer_larger=True)
      ElasticBatch(train=48, devices=(1, 2, 3, 4, 6, 8, 12))
    """
    bases = [base for base in (*micros, math.lcm(*micros)) if base <= largest]
    candidates = {
        base * _HIGHLY_COMPOSITE[bisect(_HIGHLY_COMPOSITE, largest // base) - 1] for base in bases
    }
    batches = [
        ElasticBatch(train, tuple(n for n in _sharing(train, micros) if fewest <= n <= most))
        for train in candidates
    ]
    sign = 1 if prefer_larger else -1
    return max(batches, key=lambda batch: (len(batch.devices), sign * batch.train))


def _sharing(train: int, micros: Sequence[int]) -> list[int]:
    """The numbers of devices, rising, with whole micro-batches of one size on each."""
    counts = {train // micro for micro in micros if train % micro == 0}
    pairs = (
        (n, count // n)
        for count in counts
        for n in range(1, math.isqrt(count) + 1)
        if count % n == 0
    )
    return sorted({n for pair in pairs for n in pair})
