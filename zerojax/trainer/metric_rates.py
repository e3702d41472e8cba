"""The learning rate that evaluations decide: ``reduce_lr_on_plateau``.

The rate follows from the values of ``metric_for_best_model`` in the evaluations so far, which
``log_history`` has, so that checkpoints store nothing more;
:mod:`zerojax.trainer.rate_in_state` puts the rate into the optimizer's state.

As in ``torch.optim.lr_scheduler.ReduceLROnPlateau``, after more than ``patience`` evaluations
without a better value, the rate is multiplied by ``factor``, down to ``min_lr``; then ``cooldown``
evaluations do not count as bad.

A value is better than the best by ``threshold``, a fraction of the best ("rel") or a difference
("abs", ``threshold_mode``), in the direction ``mode``, "min" or "max". A change of at most ``eps``
is not made. optax.contrib.reduce_on_plateau compares the losses of updates, with other rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerojax.config.errors import ConfigError
from zerojax.optim.schedules import Params, check_choice, check_options

NAME = "reduce_lr_on_plateau"

_OPTIONS: Params = {
    "mode": "min", "threshold_mode": "rel", "factor": 0.1, "patience": 10, "threshold": 1e-4,
    "cooldown": 0, "min_lr": 0.0, "eps": 1e-8,
}  # fmt: skip


class MetricRate:
    """Learning rate of a run, as a function of its evaluations.

    Args:
      rate: The rate of the first update.
      options: ``lr_scheduler_kwargs``.

    Raises:
      ConfigError: The schedule does not have an option, or an option's value is invalid.

    Example:
      >>> rate = MetricRate(1.0, {"patience": 1, "factor": 0.5})
      >>> [rate([2.0, 3.0, 3.0][:n]) for n in range(4)]
      [1.0, 1.0, 1.0, 0.5]
    """

    def __init__(self, rate: float, options: Params | None = None) -> None:
        check_options(NAME, options or {}, _OPTIONS)
        self._rate, self._options = rate, {**_OPTIONS, **(options or {})}
        check_choice("mode", self._options["mode"], ("min", "max"))
        check_choice("threshold_mode", self._options["threshold_mode"], ("rel", "abs"))
        if not 0 < self._options["factor"] < 1:
            raise ConfigError("lr_scheduler_kwargs: factor must be between 0 and 1")

    def __call__(self, values: Sequence[float]) -> float:
        """Returns the rate after evaluations with these values of the metric, oldest first."""
        rate, options = self._rate, self._options
        sign, threshold = (1 if options["mode"] == "min" else -1), options["threshold"]
        relative = options["threshold_mode"] == "rel"
        best, bad, cooldown = sign * math.inf, 0, 0
        for value in values:
            bound = best * (1 - sign * threshold) if relative else best - sign * threshold
            if is_better := sign * value < sign * bound:
                best = value
            bad = 0 if is_better or cooldown > 0 else bad + 1
            cooldown = max(0, cooldown - 1)
            if bad > options["patience"]:
                new = max(rate * options["factor"], options["min_lr"])
                rate = new if rate - new > options["eps"] else rate
                cooldown, bad = options["cooldown"], 0
        return rate
