"""Generation from quantized weights."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from generation.test_generate import NEW, PROMPTS, create, llama, params_of

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


def select(path: str, x: Any) -> bool:
    return "kernel" in path


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "scan"), [(8, True), (4, False)])
def test_tokens_are_those_of_dequantized_weights(bits: int, scan: bool) -> None:
    model = llama(scan=scan)
    quantized = zerojax.quantize_weights(params_of(model), bits, select=select)
    plain = jax.jit(zerojax.dequantize)(quantized)
    tokens = [
        zerojax.generate(model, params, PROMPTS, max_new_tokens=NEW)
        for params in (quantized, plain)
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "weights"),
    [(8, "by_layer"), (4, "gathered")],
)
def test_sharded_codes_give_the_tokens_of_one_device(bits: int, weights: Any) -> None:
    model = llama(scan=True)
    quantized = zerojax.quantize_weights(params_of(model), bits, select=select)
    expected = zerojax.generate(model, quantized, PROMPTS, max_new_tokens=NEW)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    state = zero.init(functools.partial(create, model))
    sharded = zerojax.quantize_weights(state.params, bits, select=select)
    tokens = zerojax.generate(model, sharded, PROMPTS, max_new_tokens=NEW, weights=weights)
    np.testing.assert_array_equal(tokens, expected)
