"""Losses of a model and a batch, for the Trainer; the batch has transformers' names.

``loss(model, batch)`` returns a dict with the ``loss``, a pair (values, weights) of arrays of the
same shape, and the predictions ``logits``. `zerojax.trainer.losses` describes the interface.

``label_smoothing`` s, the Trainer's ``label_smoothing_factor``, turns the cross-entropy
-log p[label] into (1 - s) (-log p[label]) + s mean(-log p), the mean over all V or C entries, as
transformers' ``LabelSmoother`` does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.config.errors import ConfigError
from zerojax.models.bart import shifted
from zerojax.models.hugging_face.config_file import carried
from zerojax.models.loss import cross_entropy, widen
from zerojax.xla.types import PyTree

IGNORED = -100
"""The label of a token that does not count, as in transformers."""

Batch = Mapping[str, jax.Array]
"""Arrays by name, rows on the first axis."""


def call(
    model: Callable[..., PyTree], batch: Mapping[str, object], *, without: tuple[str, ...] = ()
) -> PyTree:
    """Calls ``model(**fields)`` with the fields of the batch that its ``__call__`` names.

    The ``input_ids`` are also passed as ``tokens``, the name of zerojax's decoders.

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
    if "input_ids" in batch:
        batch = {"tokens": batch["input_ids"], **batch}
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
            f"{', '.join(batch)} (without columns of text): rename the fields, or pass "
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


def causal_lm_loss(
    model: Callable[..., jax.Array],
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
) -> dict[str, PyTree]:
    """Returns the mean cross-entropy of the next tokens, in nats; labels of -100 do not count.

    The model returns logits [B, T, V] from ``input_ids`` [B, T] or the other fields that its
    ``__call__`` names. This function shifts ``labels`` [B, T] by one token,
    as transformers does; by default the labels are the ``input_ids`` where ``attention_mask`` is
    not 0. These count the first token after padding on the left too, as transformers' collators do.
    """
    inputs = batch["input_ids"]
    logits = call(model, batch, without=("labels",))
    if (labels := batch.get("labels")) is None:
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape != inputs.shape:
            raise ValueError(
                f"attention_mask has shape {mask.shape} and input_ids {inputs.shape}: give the "
                f"rows labels, {IGNORED} on tokens that do not count"
            )
        labels = inputs if mask is None else jnp.where(mask == 0, IGNORED, inputs)
    labels = labels[:, 1:]
    return {"loss": label_losses(logits[:, :-1], labels, label_smoothing), "logits": logits}


def seq2seq_loss(
    model: Callable[..., jax.Array],
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
) -> dict[str, PyTree]:
    """Returns the mean cross-entropy of ``labels`` [B, T], in nats; labels of -100 do not count.

    The model returns logits [B, T, V] from ``input_ids`` [B, S], ``decoder_input_ids`` [B, T] and
    the other fields that its ``__call__`` names. Without ``decoder_input_ids`` the decoder reads
    the labels one token late, after the ``decoder_start_token_id`` of the model's config and with
    its ``pad_token_id`` in place of -100, as in transformers.

    Raises:
      ValueError: There are no ``decoder_input_ids``, and the config does not name these tokens.
    """
    fields = batch
    if "decoder_input_ids" not in batch and "labels" in batch:
        config = getattr(model, "config", None)
        names = ("decoder_start_token_id", "pad_token_id")
        if any(getattr(config, name, None) is None for name in names):
            raise ValueError(
                f"seq2seq_loss: the batch has no decoder_input_ids, and {type(model).__name__}'s "
                f"config no {' and '.join(names)} to compute them: add them in data_collator"
            )
        fields = {**batch, "decoder_input_ids": shifted(batch["labels"], cast(Any, config))}
    logits = call(model, fields, without=("labels",))
    if "labels" not in batch:
        return {"logits": logits}
    return {"loss": label_losses(logits, batch["labels"], label_smoothing), "logits": logits}


def classification_loss(
    model: Callable[..., jax.Array],
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
) -> dict[str, PyTree]:
    """Returns the mean cross-entropy of ``labels`` [...], in nats; labels of -100 do not count.

    The model returns logits [..., C] from the fields that its ``__call__`` names. Floating labels
    [..., C] are the probabilities of C independent labels (``multi_label_classification`` of
    transformers): the loss is then the mean of their binary cross-entropies.

    Raises:
      ValueError: Labels [..., C] are integers or smoothed, or the model's is a regression.
    """
    logits = call(model, batch, without=("labels",))
    if "labels" not in batch:
        return {"logits": logits}
    labels = batch["labels"]
    about = carried(getattr(model, "config", None))
    if logits.shape[-1] == 1 or about.get("problem_type") == "regression":
        raise ValueError(
            "num_labels = 1, or problem_type = 'regression', is a regression: pass a loss of yours "
            "to the Trainer, or num_labels=2 to from_folder"
        )
    if labels.shape != logits.shape:
        return {"loss": label_losses(logits, labels, label_smoothing), "logits": logits}
    if not jnp.issubdtype(labels.dtype, jnp.floating) or label_smoothing:
        raise ValueError(
            f"labels are {labels.dtype}{[*labels.shape]}, as the logits: pass several labels a row "
            "as floats, astype('float32'), and without label_smoothing_factor"
        )
    wide, labels = widen(logits), widen(labels)
    losses = -labels * jax.nn.log_sigmoid(wide) - (1 - labels) * jax.nn.log_sigmoid(-wide)
    return {"loss": (losses, jnp.ones_like(losses)), "logits": logits}


REGRESSION = (
    "num_labels = 1, or problem_type = 'regression', is a regression: pass a loss of yours to "
    "the Trainer, or num_labels=2 to from_folder"
)


READY = (causal_lm_loss, seq2seq_loss, classification_loss)
"""The loss functions of this module."""


def label_losses(
    logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss [...] of each label and its weight [...], 0 where the label is -100.

    Args:
      logits: [..., V].
      labels: int [...].
      label_smoothing: The factor, see the module.

    Example:
      >>> losses, weights = label_losses(jnp.zeros((2, 4)), jnp.array([1, -100]), 0.1)
      >>> [round(float(x), 4) for x in losses], weights.tolist()
      ([1.3863, 1.3863], [1.0, 0.0])
    """
    counts = labels != IGNORED
    targets = jnp.where(counts, labels, 0)
    losses = cross_entropy(logits, targets)
    if label_smoothing:
        # mean(-log p) exceeds -log p[label] by this difference, whose gradient needs no logits.
        wide = widen(logits)
        is_target = targets[..., None] == jnp.arange(logits.shape[-1])
        losses += label_smoothing * (jnp.where(is_target, wide, 0).sum(-1) - wide.mean(-1))
    return losses, counts.astype(losses.dtype)


def smoothed(loss: Callable[..., object], factor: float) -> Callable[..., object]:
    """Returns a ready loss function with ``label_smoothing_factor``; without it, any unchanged.

    Raises:
      ConfigError: There is a factor, and the function is not one of this module.
    """
    if not factor:
        return loss
    if loss not in READY:
        names = ", ".join(ready.__name__ for ready in READY)
        raise ConfigError(
            f"label_smoothing_factor = {factor:g} needs a loss of zerojax.trainer: pass one of "
            f"{names} as Trainer(loss=...), or smooth the labels in your own"
        )
    return functools.partial(loss, label_smoothing=factor)
