"""Ragged rows, padded by a tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerojax import Trainer, TrainingArguments
from zerojax.generation.decoders import longest_row
from zerojax.models.bert import SIZES, BertClassifier, BertConfig
from zerojax.models.losses import classification_loss
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


@pytest.mark.parametrize(("limit", "width"), [(None, 128), (200, 128), (70, 70), (60, 128)])
def test_padding_ends_at_the_positions_of_the_model(limit: int | None, width: int) -> None:
    collate = padded_by(Tokenizer(), limit)
    assert collate is not None
    batch = collate(rows(labels=[[7] * 3, [7] * 70]))
    assert batch["input_ids"].shape == batch["labels"].shape == (2, width)
    assert collate(rows(labels=[[7] * 3, [7] * 130]))["labels"].shape == (2, 192)


@pytest.mark.slow
def test_the_trainer_knows_the_positions_of_its_model(tmp_path: Path) -> None:
    roberta = BertConfig(**SIZES["bert-tiny"] | dict(model_type="roberta", pad_token_id=1))
    assert longest_row(BertClassifier(roberta)) == roberta.max_position_embeddings - 2
    data = [{"input_ids": [5] * 9, "label": 0}] * 8
    args = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to="none")
    trainer = Trainer(
        BertClassifier(BertConfig(**SIZES["bert-tiny"])), args, train_dataset=data,
        tokenizer=Tokenizer(), loss=classification_loss,
    )  # fmt: skip
    assert trainer.train().global_step == 1  # 32 positions


def test_an_object_that_cannot_pad() -> None:
    assert padded_by(object()) is None
    tokenizer = Tokenizer()
    tokenizer.pad_token = None  # as GPT-2's
    assert padded_by(tokenizer) is None
