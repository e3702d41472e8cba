"""The config section of the search for settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zerojax.config.kinds import POSITIVE, choice, optional
from zerojax.config.row import setting
from zerojax.config.sections import Section


@dataclass(frozen=True, kw_only=True)
class AutotuningConfig(Section):
    """The section `autotuning`: the bounds of the search for settings; off if absent.

    Raises:
      ConfigError: A smallest size is above the largest.
    """

    metric: Literal["throughput", "latency", "flops"] = setting(
        "",
        choice("throughput", "latency", "flops"),
        "throughput",
        "what fit ranks by: rows a second (as flops does, of one model), or a step's time",
    )
    max_train_batch_size: int | None = setting(
        "", optional(POSITIVE), None, "the most rows of an update, over all devices"
    )
    min_train_batch_size: int = setting("", POSITIVE, 1, "the fewest rows of an update")
    max_train_micro_batch_size_per_gpu: int = setting("", POSITIVE, 1024, "the largest micro-batch")
    min_train_micro_batch_size_per_gpu: int = setting("", POSITIVE, 1, "the smallest micro-batch")
    num_tuning_micro_batch_sizes: int = setting(
        "", POSITIVE, 3, "micro-batches to compile for each stage, remat and offload, at most"
    )

    def contradictions(self) -> Iterator[str]:
        """Yields a problem for each smallest size above the largest."""
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if high is not None and low > high:
                yield f"min_{name} = {low} is above max_{name} = {high}; lower the one"
