"""BART and BlenderBot: transformers' numbers, their options, cached decoding, a sharded step."""

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
from zerojax.models.bart import SIZES, Bart, BartConfig, shifted
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


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_transformers(name: str, scan: bool) -> None:
    config = dataclasses.replace(CONFIGS[name], scan=scan, remat=scan)
    apply = jax.jit(Bart(config).apply)
    logits = apply({"params": weights(name, config)}, SOURCE, TARGET, MASK, TARGET_MASK)
    expected = np.load(recorded.FILE)[f"{name}.logits"]
    valid = TARGET_MASK.astype(bool)
    np.testing.assert_allclose(logits[valid], expected[valid], atol=2e-5)
