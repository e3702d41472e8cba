"""One batch size for many device counts, computed as DeepSpeed's elasticity computes it."""

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
"""Highly composite numbers, with more divisors than any smaller number: DeepSpeed's list."""


class ElasticBatch(NamedTuple):
    """A batch size and the device counts that can run it.

    Attributes:
      train: Rows per update, over all devices.
      devices: The numbers of data-parallel devices that can run the batch, in ascending order.
    """

    train: int
    devices: tuple[int, ...]

    def sizes(self, micros: Sequence[int], world: int, stages: int = 1) -> BatchSizes:
        """Returns the batch sizes on `world` devices of each pipeline stage, with the largest
        micro-batch that divides.

        Raises:
          ConfigError: `world` is not in `devices`, or the devices of all stages do not divide the
            batch; the message names the nearest counts.

        Example:
          >>> ElasticBatch(48, (4, 6, 8, 12)).sizes([1, 2, 4], world=6)
          BatchSizes(train=48, micro=4, accumulation=2)
        """
        counts = [n * stages for n in self.devices if self.train % (n * stages) == 0]
        if (given := world * stages) not in counts:
            position = bisect(counts, given)
            nearest = " or ".join(map(str, counts[max(0, position - 1) : position + 1]))
            axes = f', axes={{"stage": {stages}, "data": n // {stages}}}' if stages > 1 else ""
            raise ConfigError(
                f"elasticity: a batch of {self.train} rows is not for {given} data-parallel "
                f"device{'s' * (given != 1)}{f' in {stages} pipeline stages' * (stages > 1)}; take "
                f"{nearest or 'fewer stages'}, as zerojax.mesh(n{axes}) does, or change "
                "elasticity.micro_batch_sizes, min_gpus or max_gpus"
            )
        rows = self.train // world
        micro = max(micro for micro in micros if rows % micro == 0)
        return BatchSizes(self.train, micro, rows // micro)

    def listed(self) -> str:
        """Returns the device counts as text, with "..." for the middle of more than 16.

        Example:
          >>> ElasticBatch(48, (4, 6, 8, 12)).listed()
          '4, 6, 8, 12'
        """
        counts = [str(number) for number in self.devices]
        if len(counts) > 16:
            counts[12:-1] = ["..."]
        return ", ".join(counts)


def elastic_batch(
    largest: int, micros: Sequence[int], fewest: int, most: int, prefer_larger: bool
) -> ElasticBatch:
    """Returns the batch that the most device counts can run.

    Each candidate is a micro-batch, or the least common multiple of all of them, times the largest
    highly composite number that keeps the product within `largest`.

    Args:
      largest: The most rows, not less than any micro-batch.
      micros: The allowed rows of one device in one micro-batch.
      fewest, most: The range of device counts.
      prefer_larger: Whether to break a tie between candidates by the larger batch.

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
    """Returns the device counts, ascending, with equally many full micro-batches per device."""
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
    """The section `elasticity`: one batch for many device counts, computed as in DeepSpeed.

    Attributes:
      max_train_batch_size: The most rows per update, over all devices.
      micro_batch_sizes: The allowed rows of one device in one micro-batch.
      min_gpus, max_gpus: The range of device counts, including model-parallel devices.
      prefer_larger_batch: Whether the larger of two batches for equally many device counts wins.
      ignore_non_elastic_batch_info: Whether other batch sizes are ignored; otherwise they are an
        error.
      version: DeepSpeed's algorithm; 0.2 supports nodes and model-parallel devices.
      num_gpus_per_node: The devices of a node; the job grows and shrinks by full nodes.
      model_parallel_size: The devices of one node that process the same rows.

    Raises:
      ConfigError: A wrong value, a contradiction, or no batch for any device count in the range.

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
        """The batch size and the numbers of data-parallel devices that can run it."""
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

    def sizes(self, world: int, stages: int = 1) -> BatchSizes:
        """Returns the batch sizes on `world` data-parallel devices; see `ElasticBatch.sizes`."""
        return self.batch.sizes(self.micro_batch_sizes, world, stages)

    @property
    def _per_node(self) -> int:
        """The number of data-parallel devices of a node."""
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
