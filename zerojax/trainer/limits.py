"""Checks of batches on the host, because XLA does not report an index that is out of range."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from zerojax.distributed import log
from zerojax.evaluation.batch import like
from zerojax.models.losses import IGNORED, READY, causal_lm_loss
from zerojax.trainer.losses import Forward
from zerojax.trainer.model import AnyModel, Loss, TracedLoss
from zerojax.xla.types import Shaped


class Limits:
    """Checks every batch on the host against the model's number of classes and its vocabulary.

    PyTorch raises an error if a label or a token is out of range; XLA reads another element, or
    none.

    Args:
      model: The user's model; its config's ``vocab_size`` bounds the tokens.
      loss: The loss function; labels are checked if it is one of
        :mod:`zerojax.models.losses`.
      traced: A function that traces the loss of a batch, with shapes in place of arrays.
      devices: The number of devices that share a batch; traced rows divide among them.
      labels: The fields that metrics read, whether or not the loss reads them.
    """

    def __init__(
        self,
        model: AnyModel,
        loss: Loss,
        traced: Callable[[Mapping[str, Shaped]], TracedLoss],
        devices: int = 1,
        labels: Collection[str] = (),
    ) -> None:
        self._loss, self._traced, self._devices, self._labels = loss, traced, devices, labels
        self._ready = loss in READY
        config = getattr(model, "config", None)
        vocab_size = getattr(config, "vocab_size", None)
        # A decoder may have its own vocabulary, for example of another language.
        decoder_size = getattr(config, "decoder_vocab_size", None)
        self._vocabulary = {
            "input_ids": vocab_size,
            "decoder_input_ids": decoder_size or vocab_size,
        }
        self._name, self._masks = _takes_mask(model)
        self._known: dict[frozenset[str], Forward] = {}
        self._named: set[str] = set()

    def check(self, batch: Mapping[str, np.ndarray], left_out: Collection[str] = ()) -> None:
        """Rejects a batch that the model cannot process, and logs columns that nothing reads.

        Args:
          batch: This process's rows.
          left_out: The columns of the dataset that are not in the batch.

        Raises:
          TypeError: Class labels are not integers.
          ValueError: A label or a token is out of range, the model would attend to padding, or
            nothing reads a ``loss_mask``.
        """
        for name, size in self._vocabulary.items():
            if isinstance(size, int):
                self._within(batch, name, size, f"the vocabulary of {self._name}")
        forward = self._forward(batch, left_out)
        if not self._ready:
            return
        labels = batch.get("labels")
        if labels is not None:
            logits = next(iter(forward.predictions.values())).shape
            if labels.dtype.kind not in "iub" and labels.shape[1:] != logits[1:]:
                raise TypeError(
                    f"labels are {labels.dtype}, and {self._loss.__name__} needs integers: convert "
                    "them"
                )
            self._within(batch, "labels", logits[-1], f"the last axis of {self._name}'s logits")
        is_masked = self._masks or self._loss is not causal_lm_loss or "attention_mask" not in batch
        if not is_masked and _is_left_padded(batch["attention_mask"]):  # on the right it is ignored
            raise ValueError(
                f"attention_mask: a row has padding before its tokens, and {self._name} takes "
                'no mask: pad on the right (tokenizer.padding_side = "right")'
            )

    def _forward(self, batch: Mapping[str, np.ndarray], left_out: Collection[str]) -> Forward:
        """Returns the shapes of the loss function's results for a batch with these columns."""
        names = frozenset(batch)
        if names not in self._known:
            # All processes' rows together, which `per_device` divides.
            rows = jax.process_count() * len(next(iter(batch.values())))
            self._known[names], unread = self._traced(like(batch, rows + -rows % self._devices))
            if "loss_mask" in unread:
                raise ValueError(
                    f"the batch has a loss_mask, which neither the loss nor {self._name}.__call__ "
                    f"reads: give the rows labels, {IGNORED} where none counts, or pass "
                    "Trainer(loss=...), or remove the column"
                )
            unread = [*left_out, *(n for n in unread if n not in self._labels)]
            if new := [name for name in unread if name not in self._named]:
                self._named.update(new)
                log.warning(
                    "columns without effect: %s. Neither the loss nor %s.__call__ reads them; "
                    "remove them, or rename them to its arguments.", ", ".join(new), self._name,
                )  # fmt: skip
        return self._known[names]

    def _within(self, batch: Mapping[str, np.ndarray], name: str, size: int, of: str) -> None:
        values = batch.get(name)
        if values is None or not values.size or values.dtype.kind not in "iub":
            return
        out_of_range = (values < 0) | (values >= size)
        if name == "labels":
            out_of_range &= values != IGNORED
        if out_of_range.any():
            note = f" ({IGNORED} is a label that does not count)" * (name == "labels")
            raise ValueError(
                f"{name} have {values[out_of_range][0]}, and {of} has {size}: count from 0{note}"
            )


def _is_left_padded(mask: np.ndarray) -> bool:
    """Returns whether a row of a mask [rows, tokens] has padding before a token."""
    return mask.ndim == 2 and bool((np.diff((mask != 0).astype(np.int8), axis=1) > 0).any())


def _takes_mask(model: AnyModel) -> tuple[str, bool]:
    """Returns the name of the model's class, and whether the model takes an ``attention_mask``.

    For a function that returns a model the answer is True, because its model may take the mask.
    """
    kind = model if isinstance(model, type) else type(model)
    if not issubclass(kind, nn.Module | nnx.Module):
        return getattr(model, "__name__", kind.__name__), True
    parameters = inspect.signature(kind.__call__).parameters
    keywords = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return kind.__name__, keywords or "attention_mask" in parameters
