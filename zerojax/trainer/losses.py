"""Loss functions of the Trainer: their interface; `zerojax.models.losses` has ready-to-use ones.

A loss function takes the model and a batch (a dict of arrays, rows on the first axis) and returns
a dict as the forward pass of Hugging Face's models does::

    def loss(model, batch):
        logits = model(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return {"loss": losses.mean(), "logits": logits}

- The entry ``loss`` is a scalar, the mean over rows; or a pair (values, weights) of arrays of the
  same shape, which stands for sum(values * weights) / sum(weights) over the global batch and, in
  an evaluation, over the entire dataset.
- Other entries [rows, ...] are predictions. Without predictions, the function may return just the
  loss.
- A linen model arrives bound to its parameters, an NNX model unchanged; both are called the same
  way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from zerojax.trace.gradients import weighted_mean
from zerojax.xla.types import PyTree


class Forward(NamedTuple):
    """Normalized result of a loss function.

    Attributes:
      mean: The loss [], or None if the batch has no labels.
      sums: The weighted sum [] of the losses and the sum [] of the weights if the loss is a pair,
        else None.
      predictions: The other entries, by name.
    """

    mean: jax.Array | None
    sums: tuple[jax.Array, jax.Array] | None
    predictions: dict[str, PyTree]


def _entries(given: PyTree) -> Mapping[str, PyTree]:
    """Returns a loss function's result as a mapping."""
    result = given
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        result = result._asdict()
    elif hasattr(result, "loss") and not isinstance(result, Mapping):
        result = vars(result)
    if not isinstance(result, Mapping):
        is_loss = isinstance(result, tuple) or not jnp.ndim(result)
        result = {"loss": result} if is_loss else {"logits": result}
    return cast("Mapping[str, PyTree]", result)


def loss_entry(given: object) -> PyTree:
    """Returns the loss in a loss function's result, unchanged; None if there is none."""
    return _entries(given).get("loss")


def forward_of(given: object) -> Forward:
    """Splits a loss function's result into the loss and the predictions.

    Raises:
      TypeError: The loss has none of the forms that the module's docstring describes.
    """
    result = _entries(given)
    predictions = {k: v for k, v in result.items() if k != "loss" and v is not None}
    loss = result.get("loss")
    if loss is None:
        return Forward(None, None, predictions)
    if isinstance(loss, tuple) and len(loss) == 2 and jnp.shape(loss[0]) == jnp.shape(loss[1]):
        values, weights = loss
        mean = weighted_mean(values, weights)
        weights = jnp.asarray(weights, mean.dtype)
        counted = jnp.where(weights == 0, 0, jnp.asarray(values, mean.dtype))
        return Forward(mean, (jnp.sum(counted * weights), jnp.sum(weights)), predictions)
    if isinstance(loss, tuple) or jnp.ndim(loss):
        shapes = jax.tree.map(jnp.shape, loss)
        raise TypeError(
            f"the loss is a scalar, or a pair (values, weights) of one shape, not {shapes}"
        )
    return Forward(jnp.asarray(loss), None, predictions)


def mean_loss(given: object) -> jax.Array:
    """Returns the mean loss [] in a loss function's result.

    Raises:
      ValueError: The result has no loss.
    """
    mean = forward_of(given).mean
    if mean is None:
        raise ValueError(
            "no loss: the model gave none of this batch. Give the rows `labels` and return "
            "{'loss': ...} from __call__, or pass Trainer(loss=...): zerojax.trainer's "
            "causal_lm_loss, seq2seq_loss or classification_loss, or a function (model, batch) "
            "of yours"
        )
    return mean
