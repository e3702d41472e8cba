"""The GPT: its numbers, dtypes and layouts."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models.by_name import stacked
from zerojax.models import gpt
from zerojax.models.blocks import causal_attention
from zerojax.models.gpt import GPT, SIZES, GPTConfig, loss_fn

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = GPTConfig(**SIZES["tiny"])
TOKENS = jax.random.randint(jax.random.key(1), (4, TINY.block_size), 0, TINY.vocab_size)


@pytest.fixture(scope="module")
def params() -> dict:
    return jax.jit(GPT(TINY).init)(jax.random.key(0), TOKENS)["params"]


def logits_of(params: dict, config: GPTConfig = TINY, tokens: jax.Array = TOKENS) -> jax.Array:
    return jax.jit(GPT(config).apply)({"params": params}, tokens)


def test_residual_projections_start_smaller(params: dict) -> None:
    attn = params["h_0"]["attn"]
    assert attn["c_attn"]["kernel"].std() == pytest.approx(0.02, rel=0.1)
    assert attn["c_proj"]["kernel"].std() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


@pytest.mark.slow
def test_scan_and_remat_change_nothing(params: dict) -> None:
    @partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def loss_and_grads(params: dict, config: GPTConfig) -> jax.Array:
        return loss_fn(logits_of(params, config), TOKENS)

    config = dataclasses.replace(TINY, scan=True, remat=True)
    value, grads = loss_and_grads(params, TINY)
    other, other_grads = loss_and_grads(stacked(params), config)
    np.testing.assert_allclose(other, value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        other_grads,
        stacked(grads),
    )


@pytest.mark.slow
def test_dropout_draws_by_key_and_by_layer(params: dict) -> None:
    config = dataclasses.replace(TINY, dropout=0.5, scan=True)
    variables = {"params": stacked(params)}

    @partial(jax.jit, static_argnums=1)
    def draw(seed: int, deterministic: bool = False) -> jax.Array:
        rngs = {"dropout": jax.random.key(seed)}
        return GPT(config).apply(variables, TOKENS, deterministic=deterministic, rngs=rngs)

    assert (draw(0) == draw(0)).all()
    assert not jnp.allclose(draw(0), draw(1))
    np.testing.assert_allclose(draw(0, True), logits_of(params), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "atol", "scan"), [(jnp.bfloat16, 0.02, True), (jnp.float16, 0.003, False)]
)
def test_parameters_decide_the_compute_dtype(
    params: dict, dtype: jax.typing.DTypeLike, atol: float, scan: bool
) -> None:
    config = dataclasses.replace(TINY, scan=scan)
    stacks = stacked(params) if scan else params
    half = jax.tree.map(lambda leaf: leaf.astype(dtype), stacks)
    logits = logits_of(half, config)
    np.testing.assert_allclose(logits, logits_of(params), atol=atol)
    np.testing.assert_array_equal(logits, logits.astype(dtype))  # the product itself is narrow
    fixed = logits_of(stacks, dataclasses.replace(config, dtype=dtype))
    assert logits.dtype == fixed.dtype == loss_fn(logits, TOKENS).dtype == jnp.float32
    np.testing.assert_allclose(fixed, logits, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norms_and_softmax_are_computed_in_fp32(params: dict, dtype: jax.typing.DTypeLike) -> None:
    half = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    program = str(jax.make_jaxpr(GPT(TINY).apply)({"params": half}, TOKENS))
    narrow = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype]

    def dtypes(operation: str) -> set[str]:
        return set(re.findall(rf":(\w+)\[[\d,]*\] = {operation}\b", program)) & {"f32", narrow}

    for operation in ("exp", "rsqrt", "reduce_sum", "reduce_max"):
        assert dtypes(operation) == {"f32"}, operation
    assert dtypes("select_n") <= {narrow}  # the mask does not widen the scores in memory
    assert dtypes("dot_general") == {narrow}


def test_masked_scores_are_finite_in_fp16() -> None:
    q = jnp.full((1, 4, 1, 8), 30, jnp.float16)
    k, v = -q, jnp.arange(32, dtype=jnp.float16).reshape(1, 4, 1, 8)
    out, grad = jax.value_and_grad(lambda q: causal_attention(q, k, v).sum())(q)
    assert jnp.isfinite(out)
    assert jnp.isfinite(grad).all()
    np.testing.assert_array_equal(causal_attention(q, k, v)[0, 0], v[0, 0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_loss_of_large_logits_is_beyond_fp16(dtype: jax.typing.DTypeLike) -> None:
    logits = jnp.array([[[6e4, -6e4, 0.0], [6e4, 6e4, 6e4]]], dtype)
    targets = jnp.array([[1, 2]])
    largest = float(logits[0, 0, 0])
    value, grad = jax.value_and_grad(lambda x: gpt.loss_fn(x, targets))(logits)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, (2 * largest + math.log(3)) / 2, rtol=1e-6)
    np.testing.assert_allclose(
        grad.astype(jnp.float32)[0], [[0.5, -0.5, 0], [1 / 6, 1 / 6, -1 / 3]], atol=2e-3
    )


def test_loss_and_gradient_are_optaxs(params: dict) -> None:
    logits = 5 * logits_of(params)

    def reference(logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS).mean()

    value, grad = jax.value_and_grad(loss_fn)(logits, TOKENS)
    expected, expected_grad = jax.value_and_grad(reference)(logits)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 33}, "n_embd must be a multiple of n_head = 2, not 33"),
        ({"n_layer": 0}, "n_layer must be a positive int, not 0"),
        ({"dropout": 1.0}, "dropout must be in"),
    ],
)
def test_config_names_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_too_long_a_row_is_refused(params: dict) -> None:
    with pytest.raises(ValueError, match="33 tokens in a row, but block_size = 32"):
        logits_of(params, tokens=jnp.zeros((1, 33), jnp.int32))
