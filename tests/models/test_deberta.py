"""DeBERTa: transformers' numbers, its options, and a sharded step."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from models import recorded
from models.by_name import parameters

from zerojax.models.deberta import (
    SIZES,
    Deberta,
    DebertaClassifier,
    DebertaConfig,
    bucket_of,
    rows_by_distance,
)
from zerojax.models.hugging_face.deberta import config_from_hf, names

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIGS = {name: config_from_hf(values) for name, values in recorded.DEBERTA.items()}
XLARGE = CONFIGS["xlarge"]


def weights(name: str, config: DebertaConfig) -> Any:
    model = DebertaClassifier(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), recorded.TEXT)["params"]
    return parameters(shapes, names(config), partial(recorded.drawn, name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scan"), [("xlarge", True), ("other", False)])
def test_logits_and_features_are_transformers(name: str, scan: bool) -> None:
    config = dataclasses.replace(CONFIGS[name], scan=scan, remat=scan)
    params, mask, expected = weights(name, config), recorded.TEXT_MASK, np.load(recorded.FILE)

    @jax.jit
    def compute(params: Any) -> Any:
        logits = partial(DebertaClassifier(config).apply, {"params": params}, recorded.TEXT)
        inputs = (recorded.TEXT, mask, recorded.TYPES)
        features = Deberta(config).apply({"params": params["deberta"]}, *inputs)
        return logits(mask, recorded.TYPES), logits(), features

    logits, unmasked, features = compute(params)
    np.testing.assert_allclose(logits, expected[f"{name}.logits"], atol=1e-5)
    np.testing.assert_allclose(unmasked, expected[f"{name}.unmasked"], atol=1e-5)
    valid = mask.astype(bool)
    np.testing.assert_allclose(features[valid], expected[f"{name}.hidden"][valid], atol=2e-5)


def test_buckets_are_odd_monotone_and_within_the_table() -> None:
    distances = np.arange(-600, 601)
    buckets = bucket_of(distances, 256, 512)
    np.testing.assert_array_equal(buckets, -buckets[::-1])
    assert (np.diff(buckets) >= 0).all()
    np.testing.assert_array_equal(buckets[np.abs(distances) <= 128], np.arange(-128, 129))
    assert buckets[distances == 511] == 255
    rows = rows_by_distance(DebertaConfig(**SIZES["deberta-v2-xlarge"]), 128)
    np.testing.assert_array_equal(rows, np.arange(256 + 127, 256 - 128, -1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 33}, "hidden_size must be a multiple of num_attention_heads = 4"),
        ({"num_labels": 0}, "num_labels must be a positive int, not 0"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob must be in"),
        ({"norm_rel_ebd": "rms"}, "norm_rel_ebd must be 'layer_norm' or 'none', not 'rms'"),
        ({"pos_att_type": ("p2p",)}, r"pos_att_type must be .* not \('p2p',\)"),
        ({"conv_kernel_size": 4}, "conv_kernel_size must be odd, or 0"),
    ],
)
def test_config_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(XLARGE, **change)


def test_too_long_a_row_is_refused_where_positions_end() -> None:
    model = DebertaClassifier(CONFIGS["other"])
    with pytest.raises(ValueError, match="25 tokens in a row, but max_position_embeddings = 24"):
        jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 25), np.int32))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "deberta"}, "model_type = 'deberta' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' .* supports 'gelu'"),
        ({"embedding_size": 128}, "embedding_size = 128 is not supported: .* supports 1536"),
        ({"cls_dropout": 0.3}, "cls_dropout = 0.3 is not supported: .* supports 0.1"),
    ],
)
def test_config_json_of_another_model_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)
