"""Losses of a model and a batch, for the Trainer; the batch has transformers' names.

``loss(model, batch)`` returns a dict with the ``loss``, a pair (values, weights) of arrays of the
same shape, and the predictions ``logits``. `zerojax.trainer.losses` describes the interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models.loss import cross_entropy
from zerojax.xla.types import PyTree

IGNORED = -100
"""The label of a token that does not count, as in transformers."""

Batch = Mapping[str, jax.Array]
"""Arrays by name, rows on the first axis."""


def call(
    model: Callable[..., PyTree], batch: Mapping[str, object], *, without: tuple[str, ...] = ()
) -> PyTree:
    """Calls ``model(**fields)`` with the fields of the batch that its ``__call__`` names.

    A linen model's ``deterministic``, ``train`` or ``training`` is set according to whether dropout
    has a key, which it has in training only.

    Raises:
      TypeError: The batch lacks a required argument of ``__call__``, or none of its fields is an
        argument of ``__call__``.
    """
    parameters = inspect.signature(type(model).__call__).parameters
    names = [*parameters][1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = [*names, *batch]
    fields = {k: v for k, v in batch.items() if k in names and k not in without}
    missing = [
        name
        for name, p in [*parameters.items()][1:]
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in (*fields, *_SWITCHES)
    ]
    if missing or not fields:
        raise TypeError(
            f"{type(model).__name__}.__call__ takes {', '.join(names)}, and the batch has "
            f"{', '.join(batch)} (without columns of text): name the fields alike, or pass "
            "Trainer(loss=lambda model, batch: ...)"
        )
    if isinstance(model, nn.Module):
        is_training = model.has_rng("dropout")
        fields |= {
            k: is_training is train_value for k, train_value in _SWITCHES.items() if k in names
        }
    return model(**fields)


_SWITCHES = {"deterministic": False, "train": True, "training": True}
"""Names of the argument that switches to training, and its value in training."""


def model_loss(model: Callable[..., object], batch: Mapping[str, object]) -> object:
    """Calls the model, which takes labels and returns the loss, as Hugging Face's do; default."""
    return call(model, batch)


def causal_lm_loss(model: Callable[..., jax.Array], batch: Batch) -> dict[str, PyTree]:
    """Returns the mean cross-entropy of the next tokens, in nats; labels of -100 do not count.

    The model returns logits [B, T, V] from ``input_ids`` [B, T] (also passed as ``tokens``) or the
    other fields that its ``__call__`` names. This function shifts ``labels`` [B, T] by one token,
    as transformers does; by default the labels are the ``input_ids`` where ``attention_mask`` is
    not 0.
    """
    inputs = batch["input_ids"]
    fields = {**batch, "tokens": inputs} if "tokens" not in batch else batch
    logits = call(model, fields, without=("labels",))
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


def classification_loss(model: Callable[..., jax.Array], batch: Batch) -> dict[str, PyTree]:
    """Returns the mean cross-entropy of ``labels`` [...], in nats; labels of -100 do not count.

    The model returns logits [..., C] from the fields that its ``__call__`` names.
    """
    logits = call(model, batch, without=("labels",))
    if "labels" not in batch:
        return {"logits": logits}
    counts = batch["labels"] != IGNORED
    losses = cross_entropy(logits, jnp.where(counts, batch["labels"], 0))
    return {"loss": (losses, counts.astype(losses.dtype)), "logits": logits}


def row_classification_loss(model: Callable[..., jax.Array], batch: Batch) -> dict[str, PyTree]:
    """Returns `classification_loss` of a decoder, whose tokens are the `input_ids` [B, T].

    Raises:
      ValueError: The model has a single label, which transformers trains by another loss.
    """
    result = classification_loss(model, {**batch, "tokens": batch["input_ids"]})
    if result["logits"].shape[-1] == 1:
        raise ValueError(
            "num_labels = 1 is a regression: pass a loss of yours to the Trainer, or num_labels=2 "
            "to from_folder"
        )
    return result
