"""T5: its loss, its heads, and what it refuses."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.recorded_folders import folder_of

from zerojax.models import from_folder
from zerojax.models.hugging_face.t5 import config_from_hf, config_to_hf

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_the_loss_shifts_labels_behind_the_start_token(tmp_path: Path) -> None:
    folder_of("t5", tmp_path)
    loaded = from_folder(tmp_path)
    labels = np.array([[5, 6, 1, -100], [7, 1, -100, -100]])
    batch = dict(input_ids=jnp.ones((2, 3), jnp.int32), labels=jnp.asarray(labels))

    @jax.jit
    def losses_of(params: Any, batch: Any) -> Any:
        return nn.apply(loaded.loss, loaded.model)({"params": params}, batch)["loss"]

    losses, weights = losses_of(loaded.parameters, batch)
    shifted = dict(decoder_input_ids=jnp.array([[0, 5, 6, 1], [0, 7, 1, 0]]))
    expected, _ = losses_of(loaded.parameters, batch | shifted)
    np.testing.assert_array_equal(losses, expected)
    np.testing.assert_array_equal(weights, labels >= 0)


@pytest.mark.parametrize(
    ("values", "tied", "scaled"),
    [
        ({}, True, True),
        ({"tie_word_embeddings": False}, False, False),  # as published with T5 1.1
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False, False),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, False, True),
    ],
)
def test_the_head_of_a_config(values: dict[str, Any], tied: bool, scaled: bool) -> None:
    config = config_from_hf(values)
    assert (config.tie_word_embeddings, config.scale_decoder_outputs) == (tied, scaled)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj = 'gated-silu' is not supported"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn = 'gelu' is not supported: zerojax.models.t5 sup"),
        ({"is_decoder": True}, "is_decoder = True is not supported"),
        ({"relative_attention_num_buckets": 2}, "num_buckets must be from 4 to .* = 255, not 2"),
        ({"dropout_rate": 1.0}, "T5Config.dropout_rate must be in"),
    ],
)
def test_config_names_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)
