"""Learning rates that evaluations decide: ``reduce_lr_on_plateau`` and ``greedy``.

A rate follows from the values of ``metric_for_best_model`` in the evaluations so far, which
``log_history`` has, so that checkpoints store nothing more;
:mod:`zerojax.trainer.rate_in_state` puts the rate into the optimizer's state.

- reduce_lr_on_plateau (``torch.optim.lr_scheduler.ReduceLROnPlateau``): after more than
  ``patience`` evaluations without a better value, the rate times ``factor``, at least ``min_lr``;
  then ``cooldown`` evaluations do not count as bad.
- greedy (transformers' ``GreedyLR``): so, and after more than ``patience`` better values the rate
  over ``factor``, at most ``max_lr``; then ``warmup`` evaluations do not count. At ``min_lr`` for
  ``reset_start`` reductions, the rate begins anew. ``smooth`` takes the mean of the last
  ``window_size`` values.

A value is better than the best by ``threshold``, a fraction of the best ("rel") or a difference
("abs", ``threshold_mode``), in the direction ``mode``, "min" or "max". A change of at most ``eps``
is not made. optax.contrib.reduce_on_plateau compares the losses of updates, with other rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from zerojax.config.errors import ConfigError
from zerojax.trainer.schedules import Options, chosen_options

_COMPARED = {"mode": "min", "threshold_mode": "rel"}
_PLATEAU = {
    **_COMPARED, "factor": 0.1, "patience": 10, "threshold": 1e-4, "cooldown": 0, "min_lr": 0.0,
    "eps": 1e-8,
}  # fmt: skip
_GREEDY = {
    **_COMPARED, "threshold_mode": "abs", "factor": 0.95, "patience": 10, "threshold": 1e-6,
    "cooldown": 0, "warmup": 0, "min_lr": 1e-3, "max_lr": 1.0, "eps": 1e-8, "smooth": False,
    "window_size": 50, "reset_start": 500, "verbose": False,
}  # fmt: skip


class MetricRate:
    """Learning rate of a run, as a function of its evaluations.

    Args:
      name: "reduce_lr_on_plateau" or "greedy".
      rate: The rate of the first update.
      options: ``lr_scheduler_kwargs``.

    Raises:
      ConfigError: The schedule does not have an option, or an option's value is invalid.

    Example:
      >>> rate = MetricRate("reduce_lr_on_plateau", 1.0, {"patience": 1, "factor": 0.5})
      >>> [rate([2.0, 3.0, 3.0][:n]) for n in range(4)]
      [1.0, 1.0, 1.0, 0.5]
    """

    def __init__(self, name: str, rate: float, options: Options | None = None) -> None:
        self._after, defaults = METRIC_RATES[name]
        self._rate, self._options = rate, chosen_options(name, defaults, options)
        for option, values in (("mode", ("min", "max")), ("threshold_mode", ("rel", "abs"))):
            if self._options[option] not in values:
                raise ConfigError(
                    f"lr_scheduler_kwargs: {option} = {self._options[option]!r} is none of "
                    f"{', '.join(values)}"
                )
        if not 0 < self._options["factor"] < 1:
            raise ConfigError("lr_scheduler_kwargs: factor must be between 0 and 1")

    def __call__(self, values: Sequence[float]) -> float:
        """Returns the rate after evaluations with these values of the metric, oldest first."""
        return self._after(self._rate, values, self._options)


def _sign(options: Options) -> int:
    return 1 if options["mode"] == "min" else -1


def _better(value: float, best: float, options: Options) -> bool:
    sign, threshold = _sign(options), options["threshold"]
    relative = options["threshold_mode"] == "rel"
    bound = best * (1 - sign * threshold) if relative else best - sign * threshold
    return bool(sign * value < sign * bound)


def _plateau(rate: float, values: Sequence[float], options: Options) -> float:
    best, bad, cooldown = _sign(options) * math.inf, 0, 0
    for value in values:
        if is_better := _better(value, best, options):
            best = value
        bad = 0 if is_better or cooldown > 0 else bad + 1
        cooldown = max(0, cooldown - 1)
        if bad > options["patience"]:
            rate = _reduced(rate, options)
            cooldown, bad = options["cooldown"], 0
    return rate


def _greedy(first: float, values: Sequence[float], options: Options) -> float:
    rate, best, good, bad, waiting = first, _sign(options) * math.inf, 0, 0, 0
    begin, until_reset = 0, options["reset_start"]
    for at, value in enumerate(values):
        if options["smooth"]:
            value = float(np.mean(values[max(begin, at + 1 - options["window_size"]) : at + 1]))
        if waiting > 0:
            waiting, good, bad = waiting - 1, 0, 0
        elif _better(value, best, options):
            best, good, bad = value, good + 1, 0
        else:
            good, bad = 0, bad + 1
        if good > options["patience"]:
            new = min(rate / options["factor"], options["max_lr"])
            rate = new if new - rate > options["eps"] else rate
            waiting, good, until_reset = options["warmup"], 0, options["reset_start"]
        elif bad > options["patience"]:
            rate = _reduced(rate, options)
            waiting, bad = options["cooldown"], 0
            until_reset -= rate <= options["min_lr"]
            if rate <= options["min_lr"] and until_reset <= 0:
                rate, best, good, begin = first, _sign(options) * math.inf, 0, at + 1
                until_reset = options["reset_start"]
    return rate


def _reduced(rate: float, options: Options) -> float:
    new = max(rate * options["factor"], options["min_lr"])
    return cast(float, new) if rate - new > options["eps"] else rate


METRIC_RATES: dict[
    str, tuple[Callable[[float, Sequence[float], Options], float], dict[str, object]]
] = {"reduce_lr_on_plateau": (_plateau, _PLATEAU), "greedy": (_greedy, _GREEDY)}
"""Functions from the first rate and the values so far to the rate, with their options."""
