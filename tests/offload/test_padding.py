"""Offload on a number of devices that divides no dimension: padding streams along, unseen."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
PARAMS = {
    "up": RNG.normal(size=(100, 200)).astype(np.float32) / 10,
    "down": RNG.normal(size=(200, 100)).astype(np.float32) / 10,
    "bias": np.zeros(100, np.float32),
    "stack": RNG.normal(size=(4, 100, 100)).astype(np.float32) / 10,
}
BATCHES = RNG.normal(size=(3, 14, 100)).astype(np.float32)


def create(tx: optax.GradientTransformation) -> TrainState:
    return TrainState.create(apply_fn=None, params=jax.tree.map(jnp.asarray, PARAMS), tx=tx)


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def loss(params: Any) -> jax.Array:
        x = jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"]
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["stack"])
        return jnp.mean((x - batch) ** 2) + jnp.mean(params["up"] ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value, "norm": optax.tree.norm(grads)}


def train(step: Any, state: TrainState) -> tuple[list[Any], Any]:
    losses = []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append([*map(float, jax.tree.leaves(metrics))])
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
    ("stage", "where", "keywords"),
    [
        (3, ("optimizer", "param"), {}),
        (3, ("optimizer", "param"), {"device": "nvme"}),
        pytest.param(
            3, ("optimizer", "param"), {"gradient_accumulation_steps": 2}, marks=pytest.mark.sweep
        ),
        pytest.param(2, ("optimizer",), {}, marks=pytest.mark.sweep),
    ],
)
def test_equal_to_plain_jit(
    stage: int, where: tuple[str, ...], keywords: dict[str, Any], tmp_path: Path
) -> None:
    tx = optax.adamw(1e-3)
    want = train(jax.jit(train_step), create(tx))
    keywords = dict(keywords)
    device = keywords.pop("device", "cpu")
    path = {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    sections = {f"offload_{name}": {"device": device, **path} for name in where}
    whole = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    zero = zerojax.zero(stage=stage, mesh=zerojax.mesh(devices=7), **sections, **whole, **keywords)
    state = zero.init(lambda: create(tx))
    assert not zero.plan(state).even
    losses, params = train(zero(train_step), state)
    np.testing.assert_allclose(losses, want[0], rtol=1e-5)
    # Adam divides by roots of squares: rounding counts most where gradients are smallest.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, want[1])


def test_an_update_that_would_see_padding_is_refused() -> None:
    zero = zerojax.zero(
        stage=3,
        mesh=zerojax.mesh(devices=7),
        offload_optimizer="cpu",
        stage3_param_persistence_threshold=0,
    )
    tx = optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-3))
    state = zero.init(lambda: create(tx))
    with pytest.raises(NotImplementedError, match=r"\['down'\] is padded to lie in equal pieces"):
        zero(train_step)(state, BATCHES[0])
