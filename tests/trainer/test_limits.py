"""Labels, tokens and padding that a model has no numbers for."""

import logging
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from trainer.jobs import CONFIG, Classifier

from examples.nnx_gpt import GPT as NnxGPT
from zerojax.models.gpt import GPT
from zerojax.models.losses import IGNORED, causal_lm_loss, classification_loss, model_loss
from zerojax.trainer.limits import Limits
from zerojax.trainer.losses import Forward
from zerojax.trainer.model import TracedLoss, model_of

X = np.zeros((3, 8), np.float32)
TOKENS = np.zeros((2, 4), np.int32)


class Dense(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class Uniform(nnx.Module):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jax.numpy.zeros((*tokens.shape, 8))


def limits(model: Any, loss: Any) -> Limits:
    return Limits(model, loss, model_of(model, loss, 0, False).traced, labels=("labels",))


@pytest.mark.parametrize("model", [Classifier(), Dense, Dense(rngs=nnx.Rngs(0))])
def test_labels_are_of_the_models_classes(model: Any) -> None:
    check = limits(model, classification_loss).check
    check({"x": X, "labels": np.array([0, 3, IGNORED])})
    check({"x": X})
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=rf"labels have {wrong}, and .* has 4: count from 0"):
            check({"x": X, "labels": np.array([0, wrong, 1])})
    with pytest.raises(TypeError, match="float64, and classification_loss needs integers"):
        check({"x": X, "labels": np.zeros(3)})


def test_floats_in_the_shape_of_the_logits_are_several_labels() -> None:
    check = limits(Classifier(), classification_loss).check
    check({"x": X, "labels": np.zeros((3, 4), np.float32)})
    with pytest.raises(TypeError, match="float32, and classification_loss needs integers"):
        check({"x": X, "labels": np.zeros((3, 5), np.float32)})
    check = limits(Classifier(), classification_loss).check
    with pytest.raises(ValueError, match=r"int32\[8, 4\], as the logits: pass several .* floats"):
        check({"x": np.zeros((8, 8), np.float32), "labels": np.zeros((8, 4), np.int32)})


def test_tokens_are_of_the_vocabulary() -> None:
    for loss in (causal_lm_loss, model_loss):
        with pytest.raises(ValueError, match="input_ids have 64, and the vocabulary of GPT has 64"):
            limits(GPT(CONFIG), loss).check({"input_ids": TOKENS + 64})
    with pytest.raises(ValueError, match="labels have 64"):
        limits(GPT(CONFIG), causal_lm_loss).check({"input_ids": TOKENS, "labels": TOKENS + 64})
    translator = SimpleNamespace(config=SimpleNamespace(vocab_size=64, decoder_vocab_size=80))
    check = Limits(
        translator, model_loss, lambda batch: TracedLoss(Forward(None, None, {}), [])
    ).check
    check({"input_ids": TOKENS, "decoder_input_ids": TOKENS + 64})
    with pytest.raises(ValueError, match=r"decoder_input_ids have 80, and .* has 80"):
        check({"input_ids": TOKENS, "decoder_input_ids": TOKENS + 80})


def test_padding_that_a_model_without_a_mask_would_see(caplog: pytest.LogCaptureFixture) -> None:
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    left = mask[:, ::-1]
    limits(GPT(CONFIG), causal_lm_loss).check({"input_ids": TOKENS, "attention_mask": left})
    check = limits(Uniform(), causal_lm_loss).check
    for right in (mask, mask * [1, 1, 2, 2]):  # the second as packed sequences have it
        check({"input_ids": TOKENS, "attention_mask": right})
    with pytest.raises(ValueError, match="pad on the right"):
        check({"input_ids": TOKENS, "attention_mask": left})
    check = limits(Classifier(), classification_loss).check
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check({"x": X[:2], "attention_mask": mask})
    assert caplog.text.count("columns without effect: attention_mask.") == 1


@pytest.mark.slow
def test_padding_does_not_count_as_labels() -> None:
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    _, weights = causal_lm_loss(Uniform(), {"input_ids": TOKENS, "attention_mask": mask})["loss"]
    np.testing.assert_array_equal(weights, mask[:, 1:])
    square = np.ones((2, 1, 4, 4))
    with pytest.raises(ValueError, match="give the rows labels, -100 on tokens"):
        causal_lm_loss(Uniform(), {"input_ids": TOKENS, "attention_mask": square})


@pytest.mark.parametrize("model", [GPT(CONFIG), lambda rngs: NnxGPT(CONFIG, rngs=rngs)])
def test_columns_that_nothing_reads_are_named_once(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batch = {name: TOKENS for name in ("input_ids", "position_ids", "token_type_ids", "labels")}
    check = limits(model, causal_lm_loss).check
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(batch, ["text"])
        check({"input_ids": TOKENS, "position_ids": TOKENS})
    (record,) = caplog.records
    assert "columns without effect: text, position_ids, token_type_ids." in record.getMessage()
    for rows in (batch, {"input_ids": TOKENS}):
        with pytest.raises(ValueError, match=r"loss_mask, which neither .* labels, -100"):
            check(rows | {"loss_mask": np.zeros_like(TOKENS)})


def test_what_the_loss_reads_by_itself_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: Any, batch: Any) -> Any:
        out = causal_lm_loss(model, {"input_ids": batch["input_ids"]})
        values, _ = out["loss"]
        return {"loss": (values, batch["loss_mask"][:, 1:].astype(values.dtype))}

    check = limits(GPT(CONFIG), loss).check
    with caplog.at_level(logging.WARNING):
        check({"input_ids": TOKENS, "loss_mask": np.ones_like(TOKENS), "labels": TOKENS})
        limits(Classifier(), classification_loss).check({"x": X, "labels": np.array([0, 3, 1])})
    assert not caplog.records
