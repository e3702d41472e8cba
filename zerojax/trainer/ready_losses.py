"""Ready-to-use loss functions: next tokens, a decoder's tokens, classes.

``label_smoothing`` s, the Trainer's ``label_smoothing_factor``, turns the cross-entropy
-log p[label] into (1 - s) (-log p[label]) + s mean(-log p), the mean over all V or C entries, as
transformers' ``LabelSmoother`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from zerojax.config.errors import ConfigError
from zerojax.models.bart import shifted
from zerojax.models.loss import cross_entropy, widen
from zerojax.trainer.losses import IGNORED, call
from zerojax.xla.types import PyTree


def causal_lm_loss(
    model: Callable[..., jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    label_smoothing: float = 0.0,
) -> dict[str, PyTree]:
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
    return {"loss": label_losses(logits[:, :-1], labels, label_smoothing), "logits": logits}


def seq2seq_loss(
    model: Callable[..., jax.Array],
    batch: Mapping[str, jax.Array],
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
                f"config no {' and '.join(names)} to compute them from labels: let data_collator "
                "add them"
            )
        fields = {**batch, "decoder_input_ids": shifted(batch["labels"], cast(Any, config))}
    logits = call(model, fields, without=("labels",))
    if "labels" not in batch:
        return {"logits": logits}
    return {"loss": label_losses(logits, batch["labels"], label_smoothing), "logits": logits}


def classification_loss(
    model: Callable[..., jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    label_smoothing: float = 0.0,
) -> dict[str, PyTree]:
    """Returns the mean cross-entropy of ``labels`` [...], in nats; labels of -100 do not count.

    The model returns logits [..., C] from the fields that its ``__call__`` names.
    """
    logits = call(model, batch, without=("labels",))
    if "labels" not in batch:
        return {"logits": logits}
    return {"loss": label_losses(logits, batch["labels"], label_smoothing), "logits": logits}


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
            f"label_smoothing_factor = {factor:g} is an option of the ready losses: pass "
            f"Trainer(loss=...) one of zerojax.trainer's {names}, or smooth the labels in your own"
        )
    return functools.partial(loss, label_smoothing=factor)
