"""The Trainer's numbers are those of transformers' Trainer, which `recorded.py` has stored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainer import recorded

from zerojax import Trainer, TrainingArguments
from zerojax.trainer import causal_lm_loss, classification_loss, seq2seq_loss

pytestmark = pytest.mark.usefixtures("quick_compile")
LOSSES = {"causal": causal_lm_loss, "seq2seq": seq2seq_loss, "classes": classification_loss}
SLOW = {"adagrad", "sgd"}  # each beside a case that is nearly so


class Net(nn.Module):
    """Tokens int [B, T] to logits [B, T, V], or [B, V] of classes."""

    kind: str

    @nn.compact
    def __call__(
        self, input_ids: jax.Array, decoder_input_ids: jax.Array | None = None
    ) -> jax.Array:
        embed = nn.Embed(recorded.VOCABULARY, recorded.WIDTH, name="embed")
        x = embed(input_ids)
        if decoder_input_ids is not None:
            x = embed(decoder_input_ids) + x.mean(1, keepdims=True)
        x = x.mean(1) if self.kind == "classes" else x
        return nn.Dense(recorded.VOCABULARY, name="head")(jnp.tanh(x))


class Stream:
    """Rows in order, without a number; counts its passes."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.passes = rows, list[int]()

    def set_epoch(self, number: int) -> None:
        self.passes.append(number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def trainer_of(case: recorded.Case, folder: Path, **more: Any) -> Trainer:
    arguments: dict[str, Any] = {**recorded.COMMON, **case.arguments, **more}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, per_device_eval_batch_size=1, fsdp="full_shard",
        **arguments,
    )  # fmt: skip
    rows, weights = recorded.rows(case.kind, case.rows), recorded.weights()
    head = {name: weights[name] for name in ("kernel", "bias")}
    return Trainer(
        Net(case.kind), args, train_dataset=Stream(rows) if case.stream else rows,
        params={"embed": {"embedding": weights["embed"]}, "head": head},
        loss=LOSSES[case.kind],
    )  # fmt: skip


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(recorded.FILE) as file:
        return dict(file)


def check(trainer: Trainer, name: str, stored: dict[str, np.ndarray]) -> None:
    for figure in ("loss", "learning_rate", "eval_loss"):
        if f"{name}.{figure}" in stored:
            ours = [log[figure] for log in trainer.state.log_history if figure in log]
            np.testing.assert_allclose(ours, stored[f"{name}.{figure}"], rtol=1e-5, err_msg=figure)
    params: Any = trainer.train_state.params
    ours = {"embed": params["embed"]["embedding"], **params["head"]}
    for key, x in ours.items():
        np.testing.assert_allclose(x, stored[f"{name}.{key}"], atol=2e-5, rtol=5e-5, err_msg=key)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in recorded.CASES],
)
def test_the_numbers_are_those_of_transformers(
    name: str, stored: dict[str, np.ndarray], tmp_path: Path
) -> None:
    trainer = trainer_of(recorded.CASES[name], tmp_path)
    trainer.train()
    check(trainer, name, stored)


@pytest.mark.slow
def test_a_stream_goes_on_where_it_stopped(stored: dict[str, np.ndarray], tmp_path: Path) -> None:
    case, more = recorded.CASES["stream"], {"save_strategy": "steps", "save_steps": 3}
    trainer_of(case, tmp_path, **more).train()
    resumed = trainer_of(case, tmp_path, **more, overwrite_output_dir=True)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoints/3")
    ours = [log["loss"] for log in resumed.state.log_history if "loss" in log]
    np.testing.assert_allclose(ours, stored["stream.loss"], rtol=1e-5)
