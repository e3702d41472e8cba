"""The config sections of reports that a step logs once, and of the search for settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zerojax.config.errors import as_text, closest, hint
from zerojax.config.keys.section import Section

_GATHER, _SCATTER, _REDUCE = ("all-gather",), ("reduce-scatter",), ("all-reduce",)
_TO_ALL, _PERMUTE = ("all-to-all", "ragged-all-to-all"), ("collective-permute",)

OPERATIONS: dict[str, tuple[str, ...]] = {
    "all_gather": _GATHER,
    "all_gather_into_tensor": _GATHER,
    "all_gather_coalesced": _GATHER,
    "reduce_scatter": _SCATTER,
    "reduce_scatter_tensor": _SCATTER,
    "all_reduce": _REDUCE,
    "all_reduce_coalesced": _REDUCE,
    "all_to_all": _TO_ALL,
    "all_to_all_single": _TO_ALL,
    "ragged_all_to_all": _TO_ALL,
    "broadcast": ("collective-broadcast",),
    "collective_broadcast": ("collective-broadcast",),
    "send": _PERMUTE,
    "recv": _PERMUTE,
    "isend": _PERMUTE,
    "irecv": _PERMUTE,
    "collective_permute": _PERMUTE,
}
"""XLA's kinds of collectives by the names that `prof_ops` accepts, also with "-" for "_"."""


@dataclass(frozen=True, kw_only=True)
class FlopsProfilerConfig(Section):
    """The section `flops_profiler`: FLOPs, parameters and time by module; off if absent.

    Attributes:
      profile_step: The step that is timed, counted from 0 by the decorated step itself.
      module_depth: The largest depth of listed modules; -1 for every depth.
      top_modules: The number of modules with the most FLOPs that are named at each depth.
      detailed: Whether the tree of modules follows.
      output_file: The file that the table is written to; None for the log.
    """

    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None

    _section = "flops_profiler"


@dataclass(frozen=True, kw_only=True)
class CommsLoggerConfig(Section):
    """The section `comms_logger`: the collectives of the compiled step; off if absent.

    Attributes:
      verbose: Whether each collective has its own line.
      prof_all: Whether every kind is listed, regardless of `prof_ops`.
      debug: Whether a line has the operation that the collective comes from.
      prof_ops: The kinds to list, by names in `OPERATIONS`.

    Raises:
      ConfigError: `prof_ops` has an unknown name.

    Example:
      >>> CommsLoggerConfig(prof_all=False, prof_ops=("all_gather_into_tensor",)).kinds
      ('all-gather',)
      >>> CommsLoggerConfig(prof_ops=("allgather",))
      Traceback (most recent call last):
      zerojax.config.errors.ConfigError: prof_ops: "allgather" is no collective; did you mean \
`all_gather`?
    """

    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: tuple[str, ...] = ()

    _section = "comms_logger"

    def _contradictions(self) -> Iterator[str]:
        for name in self.prof_ops:
            if name.replace("-", "_") not in OPERATIONS:
                known = f"write one of {', '.join(OPERATIONS)}"
                guess = hint(closest(name, OPERATIONS), known)
                yield f"prof_ops: {as_text(name)} is no collective; {guess}"

    def idle(self) -> dict[str, str]:
        """Returns the reason for each field that has no effect with the other fields, by name."""
        return {"prof_ops": "prof_all is true: every kind is listed"} if self.prof_all else {}

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The kinds to list, by XLA's names; None for all."""
        if self.prof_all:
            return None
        named = (OPERATIONS[name.replace("-", "_")] for name in self.prof_ops)
        return tuple(dict.fromkeys(kind for kinds in named for kind in kinds))


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
