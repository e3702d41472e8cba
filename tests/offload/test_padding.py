"""Offload on a number of devices that divides no dimension: padding streams along, unseen."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import assert_near, host
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


def by_fan_in(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    scaled = optax.stateless(lambda g, p: jax.tree.map(lambda x: x * 10 / x.shape[-1], g))
    return optax.chain(tx, scaled)


def wide(params: Any) -> Any:
    return jax.tree.map(lambda x: x.shape[-1] % 2 == 0, params)


# Each reads shapes, or more of a leaf than an element: a norm, a mean, a factored moment.
OPTIMIZERS = {
    "shape": by_fan_in(optax.adamw(1e-2)),
    "mask": optax.chain(optax.masked(optax.adam(1e-2), wide), optax.add_decayed_weights(0.1, wide)),
    "mean": optax.chain(optax.centralize(), optax.adam(1e-2)),
    "block": optax.chain(optax.clip_by_block_rms(0.001), optax.adam(1e-2)),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "late clip": optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.1)),
    "constant": optax.chain(optax.sgd(1e-2), optax.scale_by_sign(), optax.scale(1e-3)),
    "no epsilon": optax.chain(optax.scale_by_rms(eps=0.0), optax.scale(-1e-2)),
    "labels": optax.partition(
        {True: optax.sgd(0.1), False: optax.adam(1e-2)}, wide
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "noise": optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(0)), optax.sgd(1e-2)),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}  # fmt: skip


STAGES = {"all": 3, "disk": 3, "optimizer": 2}
COMMON = {(name, "all") for name in ("shape", "mask", "clip", "adafactor", "noise")} | {
    ("lamb", "disk"), ("late clip", "optimizer"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(*each, marks=() if each in COMMON else pytest.mark.sweep)
        for each in itertools.product(OPTIMIZERS, STAGES)
    ],
)
@pytest.mark.usefixtures("in_float64")
def test_optimizers_see_no_padding(name: str, where: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(10, 20)),
        "stack": rng.normal(size=(2, 20, 20)) / 4,
        "down": rng.normal(size=(20, 10)),
        "bias": rng.normal(size=10),
    }
    batches = rng.normal(size=(4, 12, 10))

    def create() -> TrainState:
        placed = jax.tree.map(jnp.asarray, params)
        return TrainState.create(apply_fn=None, params=placed, tx=OPTIMIZERS[name])

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        def loss(params: Any) -> jax.Array:
            x, _ = jax.lax.scan(block, jnp.tanh(batch @ params["up"]), params["stack"])
            return jnp.mean((x @ params["down"] + params["bias"] - batch) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = zerojax.zero(
        stage=STAGES[where],
        mesh=zerojax.mesh(devices=3),
        small_array_size=0,
        offload_optimizer=nvme if where == "disk" else "cpu",
        **{
            "offload_param": nvme if where == "disk" else "cpu",
            "stage3_param_persistence_threshold": 0,
        }
        if STAGES[where] == 3
        else {},
    )
    state, plain, sharded = zero.init(create), jax.jit(train_step), zero(train_step)
    want = create()
    assert sum(not leaf.even for leaf in zero.plan(state).leaves["params"]) == len(params)
    for batch in batches:
        want, a = plain(want, batch)
        state, b = sharded(state, batch)
        np.testing.assert_allclose(b, a, rtol=1e-9)
    assert_near(host(state.params), host(want.params), 1e-9)
