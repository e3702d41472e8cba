"""Rows cut along their tokens: a mesh with the axis "seq"."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from test_equality import assert_near, host

import zerojax
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

MESHES = {
    "4x2": {"data": 4, "seq": 2},
    "2x4": {"data": 2, "seq": 4},
    "1x8": {"data": 1, "seq": 8},
    "2x2x2": {"replica": 2, "data": 2, "seq": 2},
}
T, V = 16, 32
# Two heads of keys and values for eight of queries: repeated where more devices share the tokens.
LLAMA = LlamaConfig(
    vocab_size=V, block_size=T, n_layer=4, n_head=8, n_kv_head=2, n_embd=32, n_inner=48, scan=True,
    remat=True, mlp_chunks=2, loss_chunks=2,
)  # fmt: skip
PLAIN_LLAMA = LlamaConfig(
    vocab_size=V, block_size=T, n_layer=2, n_head=8, n_kv_head=4, n_embd=32, n_inner=48
)
GPT_2 = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=8, n_embd=32)
MODELS: dict[str, Callable[[Any], Any]] = {
    "llama_scan_remat_tiled": lambda sequence: Llama(LLAMA, sequence=sequence),
    "llama": lambda sequence: Llama(PLAIN_LLAMA, sequence=sequence),
    "gpt": lambda sequence: GPT(GPT_2, sequence=sequence),
}
TX = optax.adamw(1e-2, eps=1e-4)  # what a key's bias gets is rounding, and stays little


@functools.cache
def start(name: str) -> TrainState:
    """On one device."""
    model = MODELS[name](None)
    variables = model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    params = jax.tree.map(lambda x: x.astype(jnp.float64), variables["params"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def train_step(state: TrainState, batch: Any) -> Any:
    """The mean loss of the tokens that the mask leaves."""

    def loss_fn(params: Any) -> jax.Array:
        losses = state.apply_fn({"params": params}, batch["tokens"], targets=batch["targets"])
        return zerojax.weighted_mean(losses, batch["mask"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def batches(steps: int = 3, tokens: int = T) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    rows = rng.integers(V, size=(steps, 8, tokens + 1))
    mask = rng.integers(2, size=(steps, 8, tokens)).astype(np.float64)
    return [
        {"tokens": row[:, :-1], "targets": row[:, 1:], "mask": m}
        for row, m in zip(rows, mask, strict=True)
    ]


def run(step: Any, state: Any) -> tuple[list[float], Any]:
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, host(state.params)


@functools.cache
def plain(name: str) -> tuple[list[float], Any]:
    """Under ``jax.jit``, on one device."""
    return run(jax.jit(train_step), start(name))


COMMON = {
    ("llama_scan_remat_tiled", "2x4", 3, 1), ("gpt", "1x8", 3, 1), ("llama", "4x2", 2, 2),
    ("llama", "2x2x2", 3, 1), ("gpt", "4x2", 1, 1),
}  # fmt: skip
ALL = {
    (name, mesh, stage, accumulation)
    for name in MODELS
    for mesh in MESHES
    for stage in range(4)
    for accumulation in (1, 2)
}


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "accumulation"),
    [
        pytest.param(*case, marks=() if case in COMMON else pytest.mark.sweep)
        for case in sorted(ALL)
    ],
)
def test_a_step_computes_what_the_plain_one_computes(
    name: str, mesh: str, stage: int, accumulation: int
) -> None:
    zero = zerojax.zero(
        stage=stage,
        mesh=zerojax.mesh(axes=MESHES[mesh]),
        gradient_accumulation_steps=accumulation,
        stage3_param_persistence_threshold=0,
    )
    model = MODELS[name](zero.sequence)
    state = start(name).replace(apply_fn=model.apply)
    losses, params = run(zero(train_step), zero.init(lambda: state))
    want, want_params = plain(name)
    np.testing.assert_allclose(losses, want, rtol=1e-9)
    assert_near(params, want_params, 1e-9)
