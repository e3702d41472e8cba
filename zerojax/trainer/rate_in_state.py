"""A learning rate that evaluations decide, as an array of the optimizer's state.

``optax.inject_hyperparams`` keeps the rate in the state, so that one compiled step serves every
rate, and a checkpoint has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from zerojax.trainer.callbacks import TrainerState, check_metric
from zerojax.trainer.metric_rates import MetricRate
from zerojax.xla.types import PyTree


class InState(NamedTuple):
    """The run's rate in the optimizer's state: the transformation, and what decides the rate.

    Attributes:
      tx: The optimizer; its state has the rate.
      rate: The rate as a function of the evaluations.
      metric: The name of the metric.
    """

    tx: optax.GradientTransformation
    rate: MetricRate
    metric: str

    @classmethod
    def of(cls, tx: optax.GradientTransformation, rate: MetricRate, metric: str) -> InState:
        """Multiplies the updates of a transformation, which has the rate 1, by the rate."""
        scale = optax.inject_hyperparams(_scale)(learning_rate=rate(()))
        return cls(optax.chain(tx, scale), rate, metric)

    def after(self, train_state: PyTree, progress: TrainerState) -> PyTree:
        """Returns the training state with the rate that the evaluations in the log decide; one
        before the first update does not count.

        Raises:
          ValueError: The evaluations do not return the metric.
        """
        logs = [log for log in progress.log_history if log["step"]]
        values = [log[self.metric] for log in logs if self.metric in log]
        if not values:
            check_metric(self.metric, logs[-1])
        return with_rate(train_state, self.rate(values))


def _scale(learning_rate: jax.typing.ArrayLike) -> optax.GradientTransformation:
    return optax.scale_by_learning_rate(learning_rate, flip_sign=False)  # type: ignore[arg-type]


def with_rate(train_state: PyTree, rate: float) -> PyTree:
    """Returns a training state whose ``optax.inject_hyperparams`` has another learning rate."""

    def placed(x: jax.Array) -> jax.Array:
        value = np.asarray(rate, x.dtype)
        return jax.make_array_from_callback((), x.sharding, lambda index: value)

    def replaced(node: Any) -> Any:
        if not isinstance(node, optax.InjectStatefulHyperparamsState):
            return node
        return node._replace(hyperparams=jax.tree.map(placed, node.hyperparams))

    def is_rate(node: object) -> bool:
        return isinstance(node, optax.InjectStatefulHyperparamsState)

    return jax.tree.map(replaced, train_state, is_leaf=is_rate)
