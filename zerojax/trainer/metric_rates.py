"""The learning rate that evaluations decide: ``reduce_lr_on_plateau``.

The rate follows from the values of ``metric_for_best_model`` in the evaluations so far, which
``log_history`` has, so that checkpoints store nothing more. ``optax.inject_hyperparams`` keeps the
rate in the optimizer's state, so that one compiled step serves every rate.

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

import jax
import numpy as np
import optax

from zerojax.config.errors import ConfigError
from zerojax.optim.schedules import Params, check_choice, check_options
from zerojax.trainer.arguments import BY_METRIC
from zerojax.trainer.callbacks import TrainerState, check_metric
from zerojax.xla.types import PyTree

_OPTIONS: Params = {
    "mode": "min", "threshold_mode": "rel", "factor": 0.1, "patience": 10, "threshold": 1e-4,
    "cooldown": 0, "min_lr": 0.0, "eps": 1e-8,
}  # fmt: skip


class MetricRate:
    """Learning rate of a run, as a function of its evaluations.

    Args:
      rate: The rate of the first update.
      options: ``lr_scheduler_kwargs``.
      metric: The name of the metric.

    Raises:
      ConfigError: The schedule does not have an option, or an option's value is invalid.

    Example:
      >>> rate = MetricRate(1.0, {"patience": 1, "factor": 0.5})
      >>> [rate([2.0, 3.0, 3.0][:n]) for n in range(4)]
      [1.0, 1.0, 1.0, 0.5]
    """

    def __init__(
        self, rate: float, options: Params | None = None, metric: str = "eval_loss"
    ) -> None:
        check_options(BY_METRIC, options or {}, _OPTIONS)
        self._rate, self._options, self._metric = rate, {**_OPTIONS, **(options or {})}, metric
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

    def scale(self) -> optax.GradientTransformation:
        """Returns the transformation that multiplies updates by the rate, an array of its state."""
        return optax.inject_hyperparams(_scale)(learning_rate=self(()))

    def after(self, train_state: PyTree, progress: TrainerState) -> PyTree:
        """Returns the training state with the rate that the evaluations in the log decide; one
        before the first update does not count.

        Raises:
          ValueError: The evaluations do not return the metric.
        """
        logs = [log for log in progress.log_history if log["step"]]
        values = [log[self._metric] for log in logs if self._metric in log]
        if not values:
            check_metric(self._metric, logs[-1])
        rate = self(values)

        def placed(x: jax.Array) -> jax.Array:
            value = np.asarray(rate, x.dtype)
            return jax.make_array_from_callback((), x.sharding, lambda index: value)

        def has_rate(node: object) -> bool:
            return isinstance(node, optax.InjectStatefulHyperparamsState)

        return jax.tree.map(
            lambda x: (
                x._replace(hyperparams=jax.tree.map(placed, x.hyperparams)) if has_rate(x) else x
            ),
            train_state,
            is_leaf=has_rate,
        )


def _scale(learning_rate: jax.typing.ArrayLike) -> optax.GradientTransformation:
    return optax.scale_by_learning_rate(learning_rate, flip_sign=False)  # type: ignore[arg-type]
