"""What a loss function of the Trainer is, and two ready ones.

A loss takes the model and a batch (a dict of arrays with the rows first), and gives what the
forward pass of Hugging Face's models gives::

    def loss(model, batch):
        logits = model(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return {"loss": losses.mean(), "logits": logits}

- The entry ``loss`` is a scalar, the mean over rows; or a pair (values, weights) of arrays of one
  shape, which stands for sum(values * weights) / sum(weights) over the whole batch and, in an
  evaluation, over the whole dataset.
- Other entries [rows, ...] are predictions. Where there are none, the loss alone will do.
- A linen model comes bound to its parameters, an NNX model as it is; both are called alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models.loss import cross_entropy
from zerojax.trace.gradients import weighted_mean

IGNORED = -100
"""The label of a token that does not count, as in transformers."""


class Forward(NamedTuple):
    """What a loss function gave.

    Attributes:
      mean: The loss [], or None where the batch has no labels.
      sums: The weighted sum [] of the losses and the sum of the weights, from a pair.
      predictions: The other entries, by name.
    """

    mean: jax.Array | None
    sums: tuple[jax.Array, jax.Array] | None
    predictions: dict[str, Any]


def _entries(given: Any) -> Mapping[str, Any]:
    """A loss function's result by name."""
    result = given
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        result = result._asdict()
    elif hasattr(result, "loss") and not isinstance(result, Mapping):
        result = vars(result)
    if not isinstance(result, Mapping):
        alone = isinstance(result, tuple) or not jnp.ndim(result)
        result = {"loss": result} if alone else {"logits": result}
    return result


def loss_entry(given: Any) -> Any:
    """The loss in a loss function's result, as it is; None without one."""
    return _entries(given).get("loss")


def forward_of(given: Any) -> Forward:
    """A loss function's result, taken apart.

    Raises:
      TypeError: It is none of the forms above.
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
        kept = jnp.where(weights == 0, 0, jnp.asarray(values, mean.dtype))
        return Forward(mean, (jnp.sum(kept * weights), jnp.sum(weights)), predictions)
    if isinstance(loss, tuple) or jnp.ndim(loss):
        shapes = jax.tree.map(jnp.shape, loss)
        raise TypeError(
            f"the loss is a scalar, or a pair (values, weights) of one shape, not {shapes}: take "
            "the mean over its rows, or add the weights"
        )
    return Forward(jnp.asarray(loss), None, predictions)


def mean_loss(given: Any) -> jax.Array:
    """The mean loss [] in a loss function's result.

    Raises:
      ValueError: It has no loss.
    """
    mean = forward_of(given).mean
    if mean is None:
        raise ValueError(
            "no loss: the model gave none of this batch, or an array in place of a scalar. Give "
            "the rows `labels`, and let the model's __call__ take them and return {'loss': ...}, "
            "or pass Trainer(loss=zerojax.trainer.causal_lm_loss), classification_loss or your "
            "own: (model, batch) to a scalar, or to (values, weights) of rows or tokens"
        )
    return mean


def call(model: Any, batch: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> Any:
    """``model(**fields)`` with the fields of the batch that its ``__call__`` names.

    A linen model's ``deterministic``, ``train`` or ``training`` says whether dropout has a key, as
    it has in training alone.

    Raises:
      TypeError: ``__call__`` needs what the batch does not have, or names nothing of the batch.
    """
    parameters = inspect.signature(type(model).__call__).parameters
    names = [*parameters][1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = [*names, *batch]
    fields = {k: v for k, v in batch.items() if k in names and k not in without}
    needs = [
        name
        for name, p in [*parameters.items()][1:]
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in (*fields, *_SWITCHES)
    ]
    if needs or not fields:
        raise TypeError(
            f"{type(model).__name__}.__call__ takes {', '.join(names)}, and the batch has "
            f"{', '.join(batch)} (without columns of text): name the fields alike, or pass "
            "Trainer(loss=lambda model, batch: ...)"
        )
    if isinstance(model, nn.Module):
        drops = model.has_rng("dropout")
        fields |= {k: drops is on for k, on in _SWITCHES.items() if k in names}
    return model(**fields)


_SWITCHES = {"deterministic": False, "train": True, "training": True}
"""The names of the argument for training, and its value there."""


def model_loss(model: Any, batch: Mapping[str, Any]) -> Any:
    """The default: the model takes the labels and gives the loss, as Hugging Face's do."""
    return call(model, batch)


def causal_lm_loss(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The mean cross-entropy of each next token, in nats; 0 of them for labels of -100.

    The model gives logits [B, T, V], from ``input_ids`` [B, T] or the fields that its ``__call__``
    names. ``labels`` [B, T] are moved here, as in transformers; by default they are the
    ``input_ids`` where ``attention_mask`` is not 0.
    """
    inputs = batch["input_ids"]
    tokens = {**batch, "tokens": inputs} if "tokens" not in batch else batch
    logits = call(model, tokens, without=("labels",))
    if (labels := batch.get("labels")) is None:
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape != inputs.shape:
            raise ValueError(
                f"attention_mask has shape {mask.shape} and input_ids {inputs.shape}, so that the "
                f"mask does not say which tokens count: give the rows labels, {IGNORED} where none "
                "does"
            )
        labels = inputs if mask is None else jnp.where(mask == 0, IGNORED, inputs)
    labels = labels[:, 1:]
    counts = labels != IGNORED
    losses = cross_entropy(logits[:, :-1], jnp.where(counts, labels, 0))
    return {"loss": (losses, counts.astype(losses.dtype)), "logits": logits}


def classification_loss(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The mean cross-entropy of ``labels`` [...], in nats; those of -100 do not count.

    The model gives logits [..., C] from the fields that its ``__call__`` names.
    """
    logits = call(model, batch, without=("labels",))
    if "labels" not in batch:
        return {"logits": logits}
    counts = batch["labels"] != IGNORED
    losses = cross_entropy(logits, jnp.where(counts, batch["labels"], 0))
    return {"loss": (losses, counts.astype(losses.dtype)), "logits": logits}
