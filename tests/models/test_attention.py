"""The models' fused attention: what is chosen, and that it computes what their own does."""

import dataclasses
import functools
import importlib.util
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.hlo.program import parse
from zerojax.hlo.work import work_of
from zerojax.models import gpt, llama
from zerojax.models.attention import choose_attention, fused_attention, planned_attention

TOKAMAX = importlib.util.find_spec("tokamax") is not None
TOKENS = np.random.default_rng(0).integers(0, 96, (8, 16)).astype(np.int32)
MASK = np.arange(16) >= np.arange(8)[:, None]  # padding on the left


def model(number: int, **options: Any) -> Any:
    """A Llama (0) or a GPT (1), scanned."""
    if number == 0:
        return llama.Llama(llama.LlamaConfig(**llama.SIZES["llama-tiny"], scan=True, **options))
    return gpt.GPT(gpt.GPTConfig(**gpt.SIZES["tiny"], scan=True, **options))


@functools.cache
def params_of(number: int) -> Any:
    init = jax.jit(model(number).init)
    return jax.device_get(init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])


def gradients(number: int, model: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        losses = model.apply({"params": params}, TOKENS, targets=TOKENS, attention_mask=MASK)
        return losses.mean()

    return jax.jit(jax.value_and_grad(loss))(params_of(number))


@functools.cache
def plain_gradients(number: int) -> Any:
    return jax.device_get(gradients(number, model(number)))


def assert_computes_the_same(number: int, changed: Any) -> None:
    got, want = gradients(number, changed), plain_gradients(number)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("number", [0, 1], ids=["Llama", "GPT"])
def test_fused_attention_computes_the_same(number: int) -> None:
    mesh = zerojax.mesh(axes={"data": 4, "model": 2})
    fused = fused_attention(zerojax.zero(stage=3, mesh=mesh), sharded={"model": 2})
    assert_computes_the_same(number, dataclasses.replace(model(number), attention=fused))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("number", "is_fused"), [(0, True), (1, False)], ids=["Llama", "GPT"])
def test_a_mask_of_rows_sharded_along_their_tokens(number: int, is_fused: bool) -> None:
    zero = zerojax.zero(stage=3, mesh=zerojax.mesh(axes={"data": 4, "seq": 2}))
    sharded = dataclasses.replace(model(number, remat=True), sequence=zero.sequence)
    if is_fused:
        sharded = dataclasses.replace(sharded, attention=fused_attention(zero))
    assert_computes_the_same(number, sharded)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("number", [0, 1], ids=["Llama", "GPT"])
def test_pieces_of_the_sequence_compute_the_same(number: int) -> None:
    """The MLP in three pieces of 16 positions, and the Llama's loss."""
    more = {"loss_chunks": 3} if number == 0 else {}
    pieces = model(number, remat=True, mlp_chunks=3, **more)
    assert_computes_the_same(number, pieces)
    name = type(pieces.config).__name__
    with pytest.raises(ValueError, match=f"{name}.mlp_chunks must be a positive int, not 0"):
        dataclasses.replace(pieces.config, mlp_chunks=0)


@pytest.mark.slow
def test_a_sliding_window() -> None:
    q = jnp.asarray(np.random.default_rng(1).normal(size=(8, 6, 2, 4)), jnp.float32)
    got = fused_attention(zerojax.zero(stage=0), sliding_window=1)(q, q, q)
    np.testing.assert_allclose(got, q, rtol=1e-6)  # each position sees itself alone


def test_what_is_chosen() -> None:
    here = zerojax.zero(stage=3, bf16=True)
    assert (
        choose_attention(None, "auto")
        == choose_attention(here, "auto")
        == choose_attention(here, "plain")
        == "plain"
    )
    assert planned_attention(here, "auto") is planned_attention(None, "cudnn") is None
    with pytest.raises(ValueError, match="'flash' is unknown; there are auto, mosaic_gpu, cudnn"):
        choose_attention(here, "flash")


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_what_is_chosen_for_absent_gpus() -> None:
    for kind, config, want in [
        ("h100", {"bf16": True}, "mosaic_gpu" if TOKAMAX else "plain"),
        ("h100", {}, "plain"),
        ("a100", {"bf16": True}, "plain"),
    ]:
        zero = zerojax.zero(stage=3, mesh=zerojax.topology(kind, devices=8), **config)
        assert choose_attention(zero, "auto") == want


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler", "quick_compile")
def test_cudnns_attention_is_assumed_for_absent_gpus() -> None:
    """Two products forward, five backward, in a program that no machine runs."""
    zero = zerojax.zero(stage=0, bf16=True, mesh=zerojax.topology("h100", devices=8))
    attention = planned_attention(zero, "cudnn")
    assert attention is not None
    x = jax.ShapeDtypeStruct((8, 64, 4, 32), jnp.bfloat16)
    loss = jax.value_and_grad(lambda x: attention(x, x, x).sum(dtype="float32"))
    program = parse(jax.jit(loss).lower(x).compile().as_text() or "")
    works = [work_of(program, program.entry, each) for each in program.entry.instructions]
    counted = SimpleNamespace(
        all=sum(sum(work.attention.values()) for work in works),
        forward=sum(work.forward for work in works),
    )
    product = 2 * 4 * 64 * 64 * 32
    assert (counted.all, counted.forward) == (7 * product, 2 * product)
