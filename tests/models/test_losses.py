"""Ready losses: label smoothing by its formula, a decoder's inputs, what is refused."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.config import ConfigError
from zerojax.models.losses import (
    READY,
    causal_lm_loss,
    classification_loss,
    label_losses,
    model_loss,
    seq2seq_loss,
    smoothed,
)


@pytest.mark.slow
def test_smoothing_is_a_mean_with_the_uniform_distribution() -> None:
    rng = np.random.default_rng(0)
    logits, labels = jnp.array(rng.normal(size=(5, 7))), jnp.array([0, 6, -100, 3, 3])

    def expected(logits: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(logits)
        picked = -logs[jnp.arange(5), jnp.maximum(labels, 0)]
        return jnp.where(labels == -100, 0, 0.7 * picked - 0.3 * logs.mean(-1)).sum()

    def ours(logits: jax.Array) -> jax.Array:
        losses, weights = label_losses(logits, labels, 0.3)
        return (losses * weights).sum()

    for value, wanted in zip(*(jax.value_and_grad(f)(logits) for f in (ours, expected)),
                             strict=True):  # fmt: skip
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


class Decoder:
    """Returns its tokens as logits [B, T, 1], so that a test sees them."""

    def __init__(self, **config: int) -> None:
        self.config = SimpleNamespace(**config)

    def __call__(self, input_ids: jax.Array, decoder_input_ids: jax.Array) -> jax.Array:
        return decoder_input_ids[..., None].astype(float)


def test_a_decoder_reads_the_labels_one_token_late() -> None:
    batch: Any = {"input_ids": jnp.ones((1, 2)), "labels": jnp.array([[5, 6, -100]])}
    decoder: Any = Decoder(decoder_start_token_id=2, pad_token_id=1)
    assert seq2seq_loss(decoder, batch)["logits"][0, :, 0].tolist() == [2, 5, 6]
    own = {**batch, "decoder_input_ids": jnp.array([[3, 3, 3]])}
    assert seq2seq_loss(decoder, own)["logits"][0, :, 0].tolist() == [3, 3, 3]
    unlabelled = {name: own[name] for name in ("input_ids", "decoder_input_ids")}
    assert "loss" not in seq2seq_loss(decoder, unlabelled)
    nameless: Any = Decoder(pad_token_id=1)
    with pytest.raises(ValueError, match="Decoder's config no decoder_start_token_id and pad_to"):
        seq2seq_loss(nameless, batch)


def test_floats_in_the_shape_of_the_logits_are_several_labels() -> None:
    logits = np.array([[2.0, -1.0, 0.5], [-3.0, 4.0, 0.0]])
    labels = np.array([[1.0, 0.0, 0.25], [0.0, 1.0, 1.0]])
    fields: Any = {"x": jnp.array(logits), "labels": jnp.array(labels)}
    losses, weights = classification_loss(lambda x: x, fields)["loss"]
    p = 1 / (1 + np.exp(-logits))  # as torch's BCEWithLogitsLoss, a mean over all of them
    mean = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean()
    np.testing.assert_allclose((losses * weights).sum() / weights.sum(), mean, rtol=1e-6)
    with pytest.raises(ValueError, match="is a regression: pass a loss of yours"):
        classification_loss(lambda x: x[:, :1], fields | {"labels": fields["labels"][:, :1]})


def test_only_ready_losses_are_smoothed() -> None:
    assert smoothed(model_loss, 0.0) is model_loss
    assert smoothed(causal_lm_loss, 0.0) is causal_lm_loss
    assert all(callable(smoothed(loss, 0.1)) for loss in READY)
    with pytest.raises(ConfigError, match=r"pass one of causal_lm_loss, seq2seq_loss"):
        smoothed(model_loss, 0.1)
