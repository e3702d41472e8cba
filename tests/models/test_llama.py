"""The Llama: its parts, its variants, and a sharded step."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from tests.models.by_name import stacked
from zerojax.models.blocks import causal_attention, grouped_attention
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.loss import loss_fn
from zerojax.models.rope import RopeConfig, rotary_tables, rotate

GROUPED = LlamaConfig(
    vocab_size=61, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=88
)  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, GROUPED.vocab_size, (2, 12))

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return jax.jit(Llama(GROUPED).init)(jax.random.key(0), TOKENS)["params"]


@pytest.fixture(scope="module")
def params(drawn: dict[str, Any]) -> dict[str, Any]:
    """Wide enough that no part of the model is without effect."""
    return jax.tree.map(lambda leaf: 10 * leaf if leaf.ndim > 1 else leaf, drawn)


def logits_of(params: Any, config: LlamaConfig = GROUPED, tokens: Any = TOKENS) -> jax.Array:
    return jax.jit(Llama(config).apply)({"params": params}, tokens)


def test_scores_depend_on_the_distance_alone() -> None:
    tables = rotary_tables(9, 8, RopeConfig(rope_theta=100.0), block_size=9)
    q, k = (jnp.tile(x, (1, 9, 1, 1)) for x in jax.random.normal(jax.random.key(0), (2, 1, 1, 8)))
    scores = jnp.einsum("bqhd,bkhd->qk", rotate(q, tables), rotate(k, tables))
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-5)
    assert jnp.ptp(scores[0]) > 0.1


def test_grouped_attention_is_that_of_repeated_heads() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 5, heads, 8)) for key, heads in zip(keys, (6, 2, 2), strict=True)
    )

    def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return causal_attention(q, k.repeat(3, axis=2), v.repeat(3, axis=2))

    @partial(jax.jit, static_argnums=0)
    def with_gradients(f: Callable[..., jax.Array], *inputs: jax.Array) -> tuple[Any, Any]:
        y, pullback = jax.vjp(f, *inputs)
        return y, pullback(y)

    found = with_gradients(grouped_attention, q, k, v)
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=1e-5), found, with_gradients(repeated, q, k, v)
    )


def loss_and_grads(params: Any, config: LlamaConfig) -> tuple[jax.Array, Any]:
    def loss(params: Any) -> jax.Array:
        return Llama(config).apply({"params": params}, TOKENS, targets=TOKENS).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def unrolled(params: dict[str, Any]) -> tuple[jax.Array, Any]:
    return loss_and_grads(params, GROUPED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scan", "remat"), [(True, True), (True, "dots_no_batch"), (False, "names:q_proj")]
)
def test_scan_and_remat_change_nothing(
    params: dict[str, Any], unrolled: tuple[jax.Array, Any], scan: bool, remat: bool | str
) -> None:
    stacks, expected = params, unrolled[1]
    if scan:
        stacks, expected = stacked(params, "layers_"), stacked(expected, "layers_")
    value, grads = loss_and_grads(stacks, dataclasses.replace(GROUPED, scan=scan, remat=remat))
    np.testing.assert_allclose(value, unrolled[0], rtol=1e-6)
    np.testing.assert_allclose(value, loss_fn(logits_of(params), TOKENS), rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, expected)


def test_parameters_decide_the_compute_dtype(params: dict[str, Any]) -> None:
    config = dataclasses.replace(GROUPED, scan=True)
    stacks = stacked(params, "layers_")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), stacks)
    logits = logits_of(half, config)
    fixed = logits_of(stacks, dataclasses.replace(config, dtype=jnp.bfloat16))
    assert logits.dtype == fixed.dtype == jnp.float32
    np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16))  # the product is narrow
    for other in (fixed, logits_of(params)):  # the spread of the logits is 1.1
        assert jnp.abs(logits - other).mean() < 0.03

    program = str(jax.make_jaxpr(Llama(config).apply)({"params": half}, TOKENS))

    def dtypes(operation: str) -> set[str]:
        return set(re.findall(rf":(\w+)\[[\d,]*\] = {operation}\b", program)) & {"f32", "bf16"}

    assert dtypes("dot_general") == {"bf16"}
    for operation in ("exp", "rsqrt", "reduce_sum", "reduce_max", "cos", "sin"):
        assert dtypes(operation) == {"f32"}, operation


def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return state.apply_fn({"params": params}, batch[:, :-1], targets=batch[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def create_state(params: Any, config: LlamaConfig) -> TrainState:
    tx = optax.sgd(0.1, momentum=0.9)
    return TrainState.create(apply_fn=Llama(config).apply, params=params, tx=tx)


BATCH = np.random.default_rng(2).integers(0, GROUPED.vocab_size, (8, 13))


@pytest.mark.parametrize("scan", [False, True])
def test_products_that_blocks_compute_again_have_names(params: dict[str, Any], scan: bool) -> None:
    """All but the last of a block, whose result is added to the next block's input."""
    zero, names = zerojax.zero(stage=3), ["q_proj", "k_proj", "v_proj", "o_proj"]
    stacks = stacked(params, "layers_") if scan else params
    for remat, rest in ((True, names), ("names:q_proj,v_proj", ["k_proj", "o_proj"]), (False, [])):
        config = dataclasses.replace(GROUPED, scan=scan, remat=remat)
        state = zero.abstract_state(lambda params, c=config: create_state(params, c), stacks)
        found = zero(train_step).recomputed_names(state, BATCH)
        assert found == rest + ["gate_proj", "up_proj"] * bool(remat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 0}, "n_layer must be a positive int, not 0"),
        ({"n_kv_head": 3}, "n_head must be a multiple of n_kv_head = 3, not 4"),
        ({"n_embd": 36}, "n_embd must be a multiple of 8, for .* even size, not 36"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, not 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, not '1e-5'"),
        ({"remat": "full"}, "no remat policy 'full'.*'dots'"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be True or False, not None"),
    ],
)
def test_config_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPED, **change)
