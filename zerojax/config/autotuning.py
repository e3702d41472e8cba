"""The config section of the search for settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zerojax.config.keys.section import Section


@dataclass(frozen=True, kw_only=True)
class AutotuningConfig(Section):
    """The section `autotuning`: the bounds of the search for settings; off if absent.

    Attributes:
      metric: The measure that ranks choices: rows per second ("throughput", and "flops", which
        gives the same order for one model), or the time of a step ("latency").
      max_train_batch_size: The most rows of an update, over all devices; None for no bound.
      min_train_batch_size: The fewest rows of an update, over all devices.
      max_train_micro_batch_size_per_gpu: The most rows of one device in one micro-batch.
      min_train_micro_batch_size_per_gpu: The fewest rows of one device in one micro-batch.
      num_tuning_micro_batch_sizes: The most micro-batch sizes that are compiled for each
        combination of stage, remat and offload.

    Raises:
      ConfigError: A smallest size is above the largest.
    """

    metric: Literal["throughput", "latency", "flops"] = "throughput"
    max_train_batch_size: int | None = None
    min_train_batch_size: int = 1
    max_train_micro_batch_size_per_gpu: int = 1024
    min_train_micro_batch_size_per_gpu: int = 1
    num_tuning_micro_batch_sizes: int = 3

    _section = "autotuning"

    def _contradictions(self) -> Iterator[str]:
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if high is not None and low > high:
                yield f"min_{name} = {low} is above max_{name} = {high}; lower the one"
