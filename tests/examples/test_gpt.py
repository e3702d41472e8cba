"""The linen GPT and its NNX twin."""

import dataclasses
import json
import math
import pathlib
import struct
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples import gpt, gpt_nnx
from examples.gpt import GPT, SIZES, GPTConfig, loss_fn, stack_blocks

TINY = GPTConfig(**SIZES["tiny"])
TOKENS = jax.random.randint(jax.random.key(1), (4, TINY.block_size), 0, TINY.vocab_size)
PEERS = pathlib.Path(__file__).parents[3] / "shared" / "peers"


@pytest.fixture(scope="module")
def params() -> dict:
    return GPT(TINY).init(jax.random.key(0), TOKENS)["params"]


def logits_of(params: dict, config: GPTConfig = TINY, tokens: jax.Array = TOKENS) -> jax.Array:
    return jax.jit(GPT(config).apply)({"params": params}, tokens)


@pytest.mark.parametrize(
    ("name", "count"),
    [("tiny", 34_688), ("mini", 1_298_880), ("small", 124_475_904), ("gpt2-xl", 1_557_686_400)],
)
def test_sizes_have_gpt2s_parameter_counts(name: str, count: int) -> None:
    model = GPT(GPTConfig(**SIZES[name]))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == count


def test_initial_loss_is_that_of_a_guess(params: dict) -> None:
    logits = logits_of(params)
    assert logits.shape == (*TOKENS.shape, TINY.vocab_size)
    assert loss_fn(logits, jnp.roll(TOKENS, -1, axis=1)) == pytest.approx(
        math.log(TINY.vocab_size), abs=0.2
    )


def test_residual_projections_start_smaller(params: dict) -> None:
    attn = params["h_0"]["attn"]
    assert attn["c_attn"]["kernel"].std() == pytest.approx(0.02, rel=0.1)
    assert attn["c_proj"]["kernel"].std() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


def test_no_position_sees_what_follows(params: dict) -> None:
    changed = TOKENS.at[:, 20:].set(0)
    difference = jnp.abs(logits_of(params) - logits_of(params, tokens=changed))
    assert difference[:, :20].max() == 0
    assert difference[:, 20:].max() > 1e-3


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat_change_nothing(params: dict, scan: bool, remat: bool) -> None:
    @partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def loss_and_grads(params: dict, config: GPTConfig) -> jax.Array:
        return loss_fn(logits_of(params, config), TOKENS)

    config = dataclasses.replace(TINY, scan=scan, remat=remat)
    value, grads = loss_and_grads(params, TINY)
    other, other_grads = loss_and_grads(stack_blocks(params) if scan else params, config)
    np.testing.assert_allclose(other, value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        other_grads,
        stack_blocks(grads) if scan else grads,
    )


@pytest.mark.parametrize("scan", [False, True])
def test_dropout_draws_by_key_and_by_layer(params: dict, scan: bool) -> None:
    config = dataclasses.replace(TINY, dropout=0.5, scan=scan)
    variables = {"params": stack_blocks(params) if scan else params}

    @partial(jax.jit, static_argnums=1)
    def draw(seed: int, deterministic: bool = False) -> jax.Array:
        rngs = {"dropout": jax.random.key(seed)}
        return GPT(config).apply(variables, TOKENS, deterministic=deterministic, rngs=rngs)

    assert (draw(0) == draw(0)).all()
    assert not jnp.allclose(draw(0), draw(1))
    np.testing.assert_allclose(draw(0, True), logits_of(params), atol=1e-5)


def test_parameters_decide_the_compute_dtype(params: dict) -> None:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = logits_of(half)
    assert logits.dtype == jnp.bfloat16
    assert loss_fn(logits, TOKENS).dtype == jnp.float32
    np.testing.assert_allclose(logits.astype(jnp.float32), logits_of(params), atol=0.02)
    fixed = dataclasses.replace(TINY, dtype=jnp.bfloat16)
    assert logits_of(params, fixed).dtype == jnp.bfloat16


def test_loss_and_gradient_are_optaxs(params: dict) -> None:
    logits, mask = 5 * logits_of(params), (TOKENS % 3 == 0).astype(jnp.float32)

    def reference(logits: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS)
        return (losses * mask).sum() / mask.sum()

    value, grad = jax.value_and_grad(loss_fn)(logits, TOKENS, mask)
    expected, expected_grad = jax.value_and_grad(reference)(logits)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_nnx_twin_gives_the_same_logits_and_gradients(remat: bool) -> None:
    config = dataclasses.replace(TINY, remat=remat)
    model = gpt_nnx.GPT(config, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    np.testing.assert_allclose(model(TOKENS), logits_of(params), atol=1e-6)
    grads = nnx.jit(nnx.grad(lambda model: loss_fn(model(TOKENS), TOKENS)))(model)
    linen = jax.grad(lambda params: loss_fn(logits_of(params), TOKENS))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        nnx.to_pure_dict(nnx.state(grads)),
        linen,
    )


def test_nnx_dropout_draws_anew_and_rests_in_eval() -> None:
    model = gpt_nnx.GPT(dataclasses.replace(TINY, dropout=0.5), rngs=nnx.Rngs(0))
    assert not jnp.allclose(model(TOKENS), model(TOKENS))
    model.eval()
    assert (model(TOKENS) == model(TOKENS)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 33}, "n_embd = 33"),
        ({"n_layer": 0}, "n_layer must be a positive int, not 0"),
        ({"n_head": 2.0}, "n_head must be a positive int"),
        ({"dropout": 1.0}, "dropout must lie in"),
    ],
)
def test_config_names_what_is_wrong(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_too_long_a_row_and_nnx_scan_are_refused(params: dict) -> None:
    with pytest.raises(ValueError, match="33 tokens in a row, but block_size=32"):
        logits_of(params, tokens=jnp.zeros((1, 33), jnp.int32))
    with pytest.raises(ValueError, match="scan=False"):
        gpt_nnx.GPT(dataclasses.replace(TINY, scan=True), rngs=nnx.Rngs(0))


@pytest.mark.skipif(not PEERS.is_dir(), reason=f"no recorded weights at {PEERS}")
def test_logits_equal_hugging_faces() -> None:
    config = gpt.GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64)
    params: dict = {}
    for name, value in read_safetensors(PEERS / "gpt2_tiny.safetensors").items():
        *path, kind = name.removeprefix("transformer.").replace("h.", "h_").split(".")
        table, norm = path[-1] in ("wte", "wpe"), path[-1].startswith("ln_")
        leaf = {"bias": "bias"}.get(kind, "embedding" if table else "scale" if norm else "kernel")
        node = params
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    logits = logits_of(params, config, np.load(PEERS / "tokens.npy")[0])
    np.testing.assert_allclose(logits, np.load(PEERS / "logits_step0.npy"), atol=2e-4)


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], np.float32).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
