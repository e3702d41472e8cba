"""Padding of ragged rows by a tokenizer, as transformers' ``DataCollatorWithPadding`` does."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerojax.models.losses import IGNORED
from zerojax.trainer.data import Collator

MULTIPLE = 64
"""Rows are padded to a multiple of this length: each length is a program of its own to compile."""


def padded_by(tokenizer: Any, limit: int | None = None) -> Collator | None:
    """Returns a collator that pads with ``tokenizer.pad``; None if the tokenizer cannot pad.

    It cannot without that method, or without a pad token, as GPT-2's. ``labels`` that are lists
    are padded with -100 on the tokenizer's padding side, to the length of the inputs or, where they
    are longer, to a multiple of 64; ``label`` is renamed to ``labels``. No padding goes beyond the
    positions of the model.

    Args:
      tokenizer: A tokenizer of transformers, or any object with its ``pad``.
      limit: The number of tokens of the model's longest row; None without such a number.
    """
    if not hasattr(tokenizer, "pad") or getattr(tokenizer, "pad_token", "") is None:
        return None

    def collate(rows: list[Any]) -> dict[str, np.ndarray]:
        rows = [{("labels" if k in _LABELS else k): v for k, v in row.items()} for row in rows]
        labels = [row.pop("labels") for row in rows if "labels" in row]
        of_tokens = [np.shape(x) for x in labels] == [np.shape(row["input_ids"]) for row in rows]
        multiple = _multiple(max(len(row.get("input_ids", ())) for row in rows), limit)
        batch = tokenizer.pad(rows, padding=True, pad_to_multiple_of=multiple, return_tensors="np")
        arrays = {name: np.asarray(x) for name, x in batch.items()}
        if labels:
            width = len(arrays["input_ids"][0])
            longest = max(map(np.size, labels))
            if longest > width:
                multiple = _multiple(longest, limit)
                width = -(-longest // multiple) * multiple
            arrays["labels"] = _padded(labels, tokenizer, width, of_tokens)
        return arrays

    return collate


_LABELS = ("label", "label_ids")


def _multiple(longest: int, limit: int | None) -> int:
    """Returns the number to a multiple of which rows are padded: the model's limit if one of 64
    exceeds it and no row does."""
    rounded = -(-longest // MULTIPLE) * MULTIPLE
    return MULTIPLE if limit is None or not longest <= limit < rounded else limit


def _padded(labels: list[Any], tokenizer: Any, width: int, of_tokens: bool) -> np.ndarray:
    """Returns labels as an array; lists of one width that are not of tokens are stacked."""
    if len({np.shape(label) for label in labels}) == 1 and not of_tokens:
        return np.asarray(labels)
    out = np.full((len(labels), width), IGNORED, np.int32)
    for row, label in zip(out, labels, strict=True):
        if getattr(tokenizer, "padding_side", "right") == "left":
            row[width - len(label) :] = label
        else:
            row[: len(label)] = label
    return out
