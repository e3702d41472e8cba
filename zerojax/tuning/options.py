"""Search for the XLA options under which a step is fastest."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterator

from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trial, Trials
from zerojax.tuning.search import ranked
from zerojax.xla.compiler import DISABLED_PASSES, REMATERIALIZATION, TOGETHER, Options, knows

_SCHEDULER: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}
_BUFFERED: Options = {
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
    DISABLED_PASSES: REMATERIALIZATION,
}
_SYMMETRIC: Options = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
_TOGETHER: Options = {"xla_gpu_experimental_parallel_collective_overlap_limit": TOGETHER}
_SCALE_UP: Options = {"xla_gpu_experimental_parallel_scale_up_collective_overlap_limit": TOGETHER}


def _combined(bytes_: int) -> Options:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return {f"xla_gpu_{kind}_combine_threshold_bytes": bytes_ for kind in kinds}


_LAYER = _combined(2**29)
"""Combines a layer's collectives; a layer of a 7B model has 405 MB of parameters in bfloat16."""

CANDIDATES: tuple[Options, ...] = (
    _SCHEDULER,
    _LAYER,
    _SCHEDULER | _LAYER,
    _SCHEDULER | _TOGETHER,
    _SCHEDULER | _BUFFERED,
    _SCHEDULER | _LAYER | _BUFFERED,
    _SCHEDULER | _SYMMETRIC,
    _SCHEDULER | _TOGETHER | _SCALE_UP,
)
"""Options to compare with zerojax's defaults: others found them to matter, singly or combined."""


def search_options(
    trials: Trials,
    best: Trial,
    fixed: Collection[str],
    seconds: float,
    run: Callable[[Choice], float | None] | None = None,
) -> list[Trial]:
    """Tries a choice with and without each candidate; returns those that fit, fastest first.

    Args:
      trials: The trials of the step on the devices.
      best: The trial of the choice.
      fixed: Names of options that the config sets; they stay unchanged.
      seconds: The maximum duration of the search, in seconds.
      run: A function that runs a choice and returns the seconds of a step, or None if the choice
        does not run; None if the devices do not exist.
    """
    deadline = time.monotonic() + seconds
    fitting: list[Trial] = []
    for choice in (best.choice, *_with_options(best.choice, fixed)):
        if fitting and time.monotonic() >= deadline:
            break
        forecast = trials.tried(choice)
        if forecast is None or not forecast.fits:
            continue
        measured = None if run is None else run(choice)
        if run is None or measured is not None:
            fitting.append(Trial(choice, forecast, measured))
    return ranked(fitting) or [best]


def _with_options(choice: Choice, fixed: Collection[str]) -> Iterator[Choice]:
    """Yields the choice under each distinct candidate that this version of XLA knows."""
    seen = {choice}
    for candidate in CANDIDATES:
        if not all(itertools.starmap(knows, candidate.items())):
            continue
        options = tuple((name, value) for name, value in candidate.items() if name not in fixed)
        if (variant := dataclasses.replace(choice, xla=options)) not in seen:
            seen.add(variant)
            yield variant
