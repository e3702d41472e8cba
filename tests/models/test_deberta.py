"""DeBERTa: transformers' numbers, its options, and a sharded step."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from models import recorded
from models.by_name import parameters

import zerojax
from zerojax.models.deberta import (
    SIZES,
    Deberta,
    DebertaClassifier,
    DebertaConfig,
    bucket_of,
)
from zerojax.models.hugging_face.deberta import config_from_hf, config_to_hf, names

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIGS = {name: config_from_hf(values) for name, values in recorded.DEBERTA.items()}
XLARGE = CONFIGS["xlarge"]


def weights(name: str, config: DebertaConfig) -> Any:
    model = DebertaClassifier(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), recorded.TEXT)["params"]
    return parameters(shapes, names(config), partial(recorded.drawn, name))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_features_are_transformers(name: str, scan: bool) -> None:
    config = dataclasses.replace(CONFIGS[name], scan=scan, remat=scan)
    params, mask, expected = weights(name, config), recorded.TEXT_MASK, np.load(recorded.FILE)

    @jax.jit
    def compute(params: Any) -> Any:
        logits = partial(DebertaClassifier(config).apply, {"params": params}, recorded.TEXT)
        body = Deberta(config).apply({"params": params["deberta"]}, recorded.TEXT, mask, recorded.TYPES)
        return logits(mask, recorded.TYPES), logits(), body

    logits, unmasked, features = compute(params)
    np.testing.assert_allclose(logits, expected[f"{name}.logits"], atol=1e-5)
    np.testing.assert_allclose(unmasked, expected[f"{name}.unmasked"], atol=1e-5)
    valid = mask.astype(bool)
    np.testing.assert_allclose(features[valid], expected[f"{name}.hidden"][valid], atol=2e-5)
