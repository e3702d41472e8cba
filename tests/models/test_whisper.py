"""Whisper from folders: steps and targets are those of transformers, and positions stay fixed."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from models import recorded_encoders as recorded
from models.recorded import dtypes
from models.recorded_folders import folder_of, stored

import zerojax
from zerojax.generation.beam_search import generate
from zerojax.models import from_folder
from zerojax.models.hugging_face.whisper import config_from_hf, config_to_hf
from zerojax.models.whisper import SIZES, Whisper, WhisperConfig, sinusoids

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
def test_steps_at_stage_3_are_those_of_plain_jit(tmp_path: Path) -> None:
    folder_of("whisper", tmp_path)
    batch = dict(input_features=recorded.SOUND, labels=recorded.LABELS)
    batch = {name: np.tile(x, (4, *[1] * (x.ndim - 1))) for name, x in batch.items()}
    plain, tx = from_folder(tmp_path, scan=True), optax.sgd(0.1)
    start = TrainState.create(apply_fn=None, params=plain.parameters, tx=tx)
    expected, step = start, jax.jit(plain.train_step)

    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    loaded = from_folder(tmp_path, zero=zero, scan=True, parameters=False)
    state, sharded_step = loaded.create_state(zero, tx), zero(loaded.train_step)
    assert zero.plan(state).params["encoder"]["conv2"]["kernel"] == P(None, "data")
    losses = []
    for _ in range(2):
        expected, loss = step(expected, batch)
        state, ours = sharded_step(state, batch)
        np.testing.assert_allclose(ours, loss, rtol=1e-5)
        losses.append(float(loss))
    for x, y in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert losses[0] == pytest.approx(recorded_loss(), rel=1e-5)
    assert losses[1] < losses[0]

    tables = {
        stack: [x.params[stack]["embed_positions"]["embedding"] for x in (start, state)]
        for stack in ("encoder", "decoder")
    }
    np.testing.assert_array_equal(*tables["encoder"])
    assert (tables["decoder"][0] != tables["decoder"][1]).any()


def recorded_loss() -> float:
    """Returns the mean cross-entropy of the labels, from transformers' logits."""
    logs = jax.nn.log_softmax(stored("whisper", "logits"))
    of_labels = np.take_along_axis(logs, np.maximum(recorded.LABELS, 0)[..., None], -1)[..., 0]
    return -float(of_labels[recorded.LABELS >= 0].mean())


@pytest.mark.slow
def test_targets_are_transformers(tmp_path: Path) -> None:
    folder_of("whisper", tmp_path)
    loaded = from_folder(tmp_path, scan=True)
    write = jax.jit(partial(generate, loaded.model, **recorded.SEARCH))
    targets, _ = write({"params": loaded.parameters}, recorded.SOUND)
    np.testing.assert_array_equal(targets, stored("whisper", "targets"))


def test_new_positions_of_the_encoder_are_sinusoids() -> None:
    table = sinusoids(jax.random.key(0), (8, 32), jnp.float32)
    frequencies = 10_000.0 ** -(np.arange(16) / 15)
    np.testing.assert_allclose(table[5, :16], np.sin(5 * frequencies), atol=1e-6)
    np.testing.assert_allclose(table[5, 16:], np.cos(5 * frequencies), atol=1e-6)


def test_bf16_parameters_compute_in_bf16() -> None:
    model = Whisper(WhisperConfig(**SIZES["whisper-mini"], scan=True))
    inputs = jnp.zeros((1, 8, 32)), jnp.ones((1, 4), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    program = str(jax.make_jaxpr(model.apply)(half, *inputs))
    for product in ("dot_general", "conv_general_dilated"):
        assert dtypes(program, product) == {"bf16"}


def test_spectrograms_of_another_size_are_refused() -> None:
    model = Whisper(WhisperConfig(**SIZES["whisper-mini"]))
    message = "input_features are [2, 8, 30], but num_mel_bins and max_source_positions of the c"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8, 30)), jnp.ones((2, 4), int))


def test_published_keys_are_kept() -> None:
    values = {"model_type": "whisper", "forced_decoder_ids": [[1, 50259]], "median_filter_width": 7}
    written = config_to_hf(config_from_hf(values))
    assert values.items() <= written.items()
    assert written["max_target_positions"] == 448
    assert "max_position_embeddings" not in written
    assert written["decoder_start_token_id"] == 50257


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"apply_spec_augment": True}, "apply_spec_augment = True is not supported: zerojax.m"),
        ({"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ({"model_type": "whisper2"}, "model_type = 'whisper2' is not supported"),
        ({"num_mel_bins": 0}, "num_mel_bins must be a positive int, not 0"),
        ({"encoder_attention_heads": 5}, "384 does not divide into encoder_attention_heads = 5"),
    ],
)
def test_config_names_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)


def test_a_config_with_options_of_bart_is_refused() -> None:
    with pytest.raises(ValueError, match="normalize_before must be True, not False"):
        WhisperConfig(**SIZES["whisper-mini"], normalize_before=False)
