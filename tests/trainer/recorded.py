"""Runs of transformers' Trainer over a small network, recorded: the tests need no torch.

This file wrote them at the tag `before-the-cut` (commit 7c474e67), with transformers 5.24.0,
accelerate 1.15.0 and torch 2.13.0 on a CPU, in fp32. Weights and rows are drawn, so that both sides
draw the same, and are read in order. transformers has one device with
batches of 8 rows, zerojax eight devices with one row each.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILE = Path(__file__).parent / "data" / "transformers.npz"
VOCABULARY, WIDTH, DEVICES = 11, 6, 8


class Case(NamedTuple):
    """A run: its network, its rows, whether they are a stream, and the arguments of both sides."""

    kind: str
    arguments: dict[str, Any]
    rows: int = 32
    stream: bool = False


COMMON: dict[str, Any] = dict(
    learning_rate=0.05, weight_decay=0.1, max_steps=4, lr_scheduler_type="constant",
    train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none",
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
_TWICE = {"gradient_accumulation_steps": 2}
CASES: dict[str, Case] = {
    "causal, smoothed": Case("causal", {**_TWICE, "label_smoothing_factor": 0.1}, rows=27),
    "seq2seq, smoothed": Case("seq2seq", {"label_smoothing_factor": 0.2}),
    "classes, smoothed": Case("classes", {**_TWICE, "label_smoothing_factor": 0.1}, rows=27),
    "dropped": Case("classes", {**_TWICE, "dataloader_drop_last": True}, rows=27),
    "stream": Case("classes", _TWICE, rows=27, stream=True),
    "adafactor": Case("classes", {"optim": "adafactor"}),
    "rmsprop, centered": Case(
        "classes",
        {"optim": "rmsprop", "optim_args": "momentum=0.5,centered=True,alpha=0.9,eps=1e-4",
         "learning_rate": 0.01},
    ),
    "adagrad": Case("classes", {"optim": "adagrad"}),
    "sgd": Case("classes", {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"}),
}  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """The parameters of the network, as flax has them."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, WIDTH), "kernel": (WIDTH, VOCABULARY), "bias": (VOCABULARY,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def rows(kind: str, number: int) -> list[dict[str, Any]]:
    """Rows of a kind of network; the tokens of a row count unequally often."""
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(number):
        row: dict[str, Any] = {"input_ids": rng.integers(0, VOCABULARY, 5)}
        if kind == "classes":
            row["labels"] = int(rng.integers(0, VOCABULARY))
        else:
            counts = np.arange(5) < rng.integers(2, 6)
            row["labels"] = np.where(counts, rng.integers(0, VOCABULARY, 5), -100)
        if kind == "seq2seq":
            row["decoder_input_ids"] = rng.integers(0, VOCABULARY, 5)
        drawn.append(row)
    return drawn
