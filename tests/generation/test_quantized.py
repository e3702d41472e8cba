"""Generation from quantized weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation.test_generate import NEW, PROMPTS, create, llama, params_of

import zerojax
from zerojax.trace.scaled_products import with_scaled_products

pytestmark = pytest.mark.usefixtures("quick_compile")


def select(path: str, x: Any) -> bool:
    return "kernel" in path


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


def products(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    return x @ (codes.astype(x.dtype) * scales)


def names(f: Any, *args: jax.Array) -> list[str]:
    closed = with_scaled_products(jax.make_jaxpr(f)(*args))
    return [eqn.primitive.name for eqn in closed.eqns]


def test_scales_of_outputs_follow_the_product() -> None:
    x, codes = jnp.ones((2, 4)), jnp.arange(24, dtype=jnp.int8).reshape(4, 6)
    by_output, by_input = jnp.arange(1.0, 7)[None], jnp.arange(1.0, 5)[:, None]
    assert "reshape" in names(products, x, codes, by_output)
    assert names(products, x, codes, by_input) == ["convert_element_type", "mul", "dot_general"]
    rewritten = with_scaled_products(jax.make_jaxpr(products)(x, codes, by_output))
    (out,) = jax.core.eval_jaxpr(rewritten.jaxpr, rewritten.consts, x, codes, by_output)
    np.testing.assert_allclose(out, products(x, codes, by_output), rtol=1e-6)
