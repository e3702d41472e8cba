"""Ragged rows, padded by a tokenizer."""

from typing import Any

import numpy as np
import pytest

from zerojax.trainer.padding import padded_by


class Tokenizer:
    """Pads as a tokenizer of transformers does."""

    def __init__(self, padding_side: str = "right") -> None:
        self.padding_side = padding_side
        self.pad_token: str | None = "<pad>"

    def pad(
        self, rows: list[dict[str, Any]], *, padding: bool, pad_to_multiple_of: int,
        return_tensors: str,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
        return {
            name: np.stack([np.pad(row[name], (0, width - len(row[name]))) for row in rows])
            for name in rows[0]
        }


def rows(**labels: Any) -> list[dict[str, Any]]:
    (name, values), = labels.items()  # fmt: skip
    return [
        {"input_ids": [5] * n, "attention_mask": [1] * n, name: label}
        for n, label in zip((3, 70), values, strict=True)
    ]


def test_inputs_and_classes() -> None:
    collate = padded_by(Tokenizer())
    assert collate is not None
    batch = collate(rows(label=[1, 0]))
    assert batch["input_ids"].shape == (2, 128)  # few lengths, few programs to compile
    assert batch["attention_mask"].sum(1).tolist() == [3, 70]
    assert np.asarray(batch["labels"]).tolist() == [1, 0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_tokens_are_padded_beside_the_inputs(side: str) -> None:
    collate = padded_by(Tokenizer(side))
    assert collate is not None
    labels = np.asarray(collate(rows(labels=[[7] * 3, [7] * 70]))["labels"])
    assert labels.shape == (2, 128)
    counted = labels[0] != -100
    assert counted.sum() == 3
    assert counted[0 if side == "right" else -1]


def test_an_object_that_cannot_pad() -> None:
    assert padded_by(object()) is None
    tokenizer = Tokenizer()
    tokenizer.pad_token = None  # as GPT-2's
    assert padded_by(tokenizer) is None
