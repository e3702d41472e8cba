"""One batch size that many numbers of devices share, as DeepSpeed's elasticity computes it."""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zerojax.config.batch import BatchSizes
from zerojax.config.errors import ConfigError
from zerojax.config.keys.section import Section

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


@dataclass(frozen=True, kw_only=True)
class Elasticity(Section):
    """One batch for many numbers of devices, as DeepSpeed computes it: `elasticity`.

    Attributes:
      max_train_batch_size: The most rows per update, over all devices.
      micro_batch_sizes: The rows that a device may have in one micro-batch.
      min_gpus, max_gpus: The range of the numbers of devices, model-parallel ones counted.
      prefer_larger_batch: Whether the larger of two batches for as many numbers is taken.
      ignore_non_elastic_batch_info: Whether other batch sizes have no effect; they are an error
        otherwise.
      version: DeepSpeed's algorithm; 0.2 knows nodes and model-parallel devices.
      num_gpus_per_node: The devices of a node, which come and go together.
      model_parallel_size: The devices, of one node, that share the rows of one.

    Raises:
      ConfigError: A wrong value, a contradiction, or a range without a number that has a batch.

    Example:
      >>> Elasticity(max_train_batch_size=50, micro_batch_sizes=[2, 4], max_gpus=12).batch
      ElasticBatch(train=48, devices=(1, 2, 3, 4, 6, 8, 12))
    """

    max_train_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    min_gpus: int = 1
    max_gpus: int = 10_000
    prefer_larger_batch: bool = True
    ignore_non_elastic_batch_info: bool = False
    version: float = 0.2
    num_gpus_per_node: int = 1
    model_parallel_size: int = 1

    _section = "elasticity"

    @cached_property
    def batch(self) -> ElasticBatch:
        """The batch, and the numbers of data-parallel devices that share it."""
        per_node, gpus = self._per_node, self.num_gpus_per_node
        by_nodes = elastic_batch(
            self.max_train_batch_size // per_node,
            self.micro_batch_sizes,
            self.min_gpus // gpus,
            self.max_gpus // gpus,
            self.prefer_larger_batch,
        )
        devices = tuple(nodes * per_node for nodes in by_nodes.devices)
        return ElasticBatch(by_nodes.train * per_node, devices)

    def sizes(self, world: int) -> BatchSizes:
        """The batch sizes on `world` data-parallel devices; see `ElasticBatch.sizes`."""
        return self.batch.sizes(self.micro_batch_sizes, world)

    @property
    def _per_node(self) -> int:
        """The data-parallel devices of a node."""
        return self.num_gpus_per_node // self.model_parallel_size

    def _contradictions(self) -> Iterator[str]:
        gpus, parallel = self.num_gpus_per_node, self.model_parallel_size
        micro, most = max(self.micro_batch_sizes), self.max_train_batch_size
        if self.version == 0.1 and (gpus > 1 or parallel > 1):
            name = "num_gpus_per_node" if gpus > 1 else "model_parallel_size"
            yield f"{name}: version 0.1 knows no nodes; set version to 0.2, or take {name} out"
        elif gpus % parallel:
            yield (
                f"num_gpus_per_node = {gpus} is no multiple of model_parallel_size = {parallel}; "
                "give the GPUs of a node, which model-parallel ones share"
            )
        elif self.min_gpus > self.max_gpus:
            yield f"min_gpus = {self.min_gpus} is above max_gpus = {self.max_gpus}; lower it"
        elif self.max_gpus < gpus:
            yield (
                f"max_gpus = {self.max_gpus} is less than a node, num_gpus_per_node = {gpus}; "
                "raise it"
            )
        elif micro * self._per_node > most:
            node = f" / {self._per_node} data-parallel devices of a node" * (self._per_node > 1)
            yield (
                f"micro_batch_sizes: {micro} is above max_train_batch_size = {most}{node}; raise "
                f"it, or take {micro} out"
            )
        elif not self.batch.devices:
            yield (
                f"min_gpus: no number of devices from {self.min_gpus} to {self.max_gpus} shares a "
                f"batch of at most max_train_batch_size = {most} rows; lower min_gpus, or raise "
                "max_train_batch_size"
            )
