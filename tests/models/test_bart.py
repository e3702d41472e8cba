"""BART and BlenderBot: transformers' numbers, their options, cached decoding, a sharded step."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from models import recorded
from models.by_name import parameters

from zerojax.models.bart import Bart, BartConfig
from zerojax.models.hugging_face.bart import config_from_hf, config_to_hf, names

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIGS = {
    name: dataclasses.replace(config_from_hf(values), add_logits_bias=name == "bart")
    for name, values in recorded.BART.items()
}
SOURCE, MASK = recorded.SOURCE, recorded.SOURCE_MASK
TARGET, TARGET_MASK = recorded.TARGET, recorded.TARGET_MASK


def weights(name: str, config: BartConfig) -> Any:
    shapes = jax.eval_shape(Bart(config).init, jax.random.key(0), SOURCE, TARGET)["params"]
    return parameters(shapes, names(config), partial(recorded.drawn, name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scan"), [("bart", True), ("blenderbot", False)])
def test_logits_are_transformers(name: str, scan: bool) -> None:
    config = dataclasses.replace(CONFIGS[name], scan=scan, remat=scan)
    apply = jax.jit(Bart(config).apply)
    logits = apply({"params": weights(name, config)}, SOURCE, TARGET, MASK, TARGET_MASK)
    expected = np.load(recorded.FILE)[f"{name}.logits"]
    valid = TARGET_MASK.astype(bool)
    np.testing.assert_allclose(logits[valid], expected[valid], atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 30}, "d_model must be a multiple of encoder_attention_heads = 4"),
        ({"decoder_layers": 0}, "decoder_layers must be a positive int, not 0"),
    ],
)
def test_config_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS["bart"], **change)


def test_config_json_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type = 'mbart' is not supported"):
        config_from_hf({"model_type": "mbart"})
    with pytest.raises(ValueError, match="normalize_before = True is not supported"):
        config_from_hf({"model_type": "bart", "normalize_before": True})
    with pytest.raises(ValueError, match="normalize_embedding = True is not supported"):
        config_to_hf(dataclasses.replace(CONFIGS["bart"], normalize_before=True))
