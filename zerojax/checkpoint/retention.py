"""Retention: the steps that a folder keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint.errors import CheckpointError

_WORST = {"min": math.inf, "max": -math.inf}


@dataclass(frozen=True)
class Retention:
    """The newest steps, and the best by a metric.

    Attributes:
      keep: The number of newest steps; None for all.
      keep_best: The number of best steps.
      metric: The entry of a step's metrics to compare.
      mode: "min" if a smaller metric is better, or "max". NaN is worse than any number.

    Raises:
      CheckpointError: the values contradict each other.
    """

    keep: int | None
    keep_best: int
    metric: str | None
    mode: str

    def __post_init__(self) -> None:
        are_ints = all(type(n) is int for n in (self.keep or 1, self.keep_best))
        if not are_ints or (self.keep is not None and self.keep < 1) or self.keep_best < 0:
            raise CheckpointError(
                f"keep={self.keep!r}, keep_best={self.keep_best!r}: pass integers; None keeps all"
            )
        if bool(self.keep_best) != (self.metric is not None) or (
            self.keep_best and self.keep is None
        ):
            raise CheckpointError(
                f"keep={self.keep}, keep_best={self.keep_best}, metric={self.metric!r}: pass all "
                "three to keep the best steps by a metric"
            )
        if self.mode not in _WORST:
            raise CheckpointError(f"mode={self.mode!r}: pass {' or '.join(_WORST)}")

    def checked(self, step: int, metrics: Mapping[str, Any] | None) -> dict[str, float] | None:
        """Returns a step's metrics as floats.

        Raises:
          CheckpointError: a metric is not a number, or ``metric`` is missing.
        """
        if not isinstance(metrics, Mapping | None):
            raise CheckpointError(f"metrics={metrics!r}: pass numbers by name")
        if self.metric is not None and self.metric not in (metrics or {}):
            raise CheckpointError(
                f"step {step} has no metric {self.metric!r}: pass save(..., metrics={{...}})"
            )
        if metrics is None:
            return None
        return {name: _number(name, value) for name, value in metrics.items()}

    def score(self, metrics: Mapping[str, float]) -> float:
        """Returns a step's ``metric``; the worst value if it is missing or NaN."""
        value = metrics.get(self.metric or "", math.nan)
        return _WORST[self.mode] if math.isnan(value) else value

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Returns the best step; None if no step has a score."""
        known = {step: x for step, x in scores.items() if x != _WORST[self.mode]}
        choose = min if self.mode == "min" else max
        return choose(known, key=known.__getitem__, default=None)

    def expired(self, folders: Mapping[int, epath.Path]) -> list[int]:
        """Returns the steps in ``folders`` to remove.

        Of steps with equal metrics the oldest is the best. If ``metric`` is set, steps without any
        metrics are kept.
        """
        steps = sorted(folders)
        kept = {*steps} if self.keep is None else {*steps[-self.keep :]}
        if self.metric is not None:
            metrics = {step: _metrics(folders[step]) for step in steps}
            scores = {step: self.score(x) for step, x in metrics.items() if x is not None}
            sign = 1 if self.mode == "min" else -1
            best = sorted(scores, key=lambda step: (sign * scores[step], step))[: self.keep_best]
            kept |= {*best, *(metrics.keys() - scores.keys())}
        return [step for step in steps if step not in kept]


def _number(name: str, value: SupportsFloat | str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"metrics[{name!r}]: pass a number ({error})") from None


def _metrics(folder: epath.Path) -> Mapping[str, float] | None:
    """Returns a step's metrics; None if it has none or they cannot be read."""
    try:
        record = records.read(folder)
    except CheckpointError:
        return None
    return record.metrics if record else None
