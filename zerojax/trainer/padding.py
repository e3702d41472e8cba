"""Padding of ragged rows by a tokenizer, as transformers' ``DataCollatorWithPadding`` does."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerojax.models.losses import IGNORED
from zerojax.trainer.data import Collator

MULTIPLE = 64
"""Rows are padded to a multiple of this length: each length is a program of its own to compile."""


def padded_by(tokenizer: Any) -> Collator | None:
    """Returns a collator that pads with ``tokenizer.pad``; None if the tokenizer cannot pad.

    It cannot without that method, or without a pad token, as GPT-2's. ``labels`` that are lists
    are padded with -100 on the tokenizer's padding side, to the length of the inputs or, where they
    are longer, to a multiple of 64; ``label`` is renamed to ``labels``.

    Args:
      tokenizer: A tokenizer of transformers, or any object with its ``pad``.
    """
    if not hasattr(tokenizer, "pad") or getattr(tokenizer, "pad_token", "") is None:
        return None

    def collate(rows: list[Any]) -> dict[str, np.ndarray]:
        rows = [{("labels" if k in _LABELS else k): v for k, v in row.items()} for row in rows]
        labels = [row.pop("labels") for row in rows if "labels" in row]
        of_tokens = [np.shape(x) for x in labels] == [np.shape(row["input_ids"]) for row in rows]
        batch = tokenizer.pad(rows, padding=True, pad_to_multiple_of=MULTIPLE, return_tensors="np")
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        if labels:
            width = len(arrays["input_ids"][0])
            arrays["labels"] = _padded(labels, tokenizer, width, of_tokens)
        return arrays

    return collate


_LABELS = ("label", "label_ids")


def _padded(labels: list[Any], tokenizer: Any, width: int, of_tokens: bool) -> np.ndarray:
    """Returns labels as an array; lists of one width that are not of tokens are stacked."""
    if len({np.shape(label) for label in labels}) == 1 and not of_tokens:
        return np.asarray(labels)
    longest = max(map(len, labels))
    width = width if longest <= width else -(-longest // MULTIPLE) * MULTIPLE
    out = np.full((len(labels), width), IGNORED, np.int32)
    for row, label in zip(out, labels, strict=True):
        if getattr(tokenizer, "padding_side", "right") == "left":
            row[width - len(label) :] = label
        else:
            row[: len(label)] = label
    return out
