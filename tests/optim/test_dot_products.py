"""Optimizers that compute dot products send what AdamW sends, compiled for 8 absent H100s: a device
multiplies its own shards of gradients, parameters and state."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

DEVICES, ROWS, WIDTH, HIDDEN = 8, 256, 64, 256
NUMBERS = 4096
"""Bytes of the dot products that a device sends: by leaf, and by iteration of L-BFGS's loops."""


def create(tx: Any, key: jax.Array) -> TrainState:
    """Matrices and a stack that are sharded along different dimensions, and a bias."""
    params = {
        "in": jnp.zeros((WIDTH, HIDDEN)),
        "bias": jnp.zeros((HIDDEN,)),
        "layers": jnp.zeros((2, HIDDEN, HIDDEN)),
        "out": jnp.zeros((HIDDEN, WIDTH)),
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss(params: Any) -> jax.Array:
        return loss_of(params, batch)

    value, grads = jax.value_and_grad(loss)(state.params)
    tx = optax.with_extra_args_support(state.tx)
    updates, opt_state = tx.update(
        grads, state.opt_state, state.params, value=value, grad=grads, value_fn=loss
    )
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value


def moved(tx: Any) -> dict[str, int]:
    """Bytes that a device sends in a step, by kind of collective."""
    zero = zerojax.zero(
        stage=3,
        stage3_param_persistence_threshold=0,
        small_array_size=0,
        mesh=zerojax.topology("h100", DEVICES),
    )
    state = zero.abstract_state(functools.partial(create, tx), jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct((ROWS, WIDTH), "float32") for name in "xy"}
    text = zero(step).lower(state, batch).compile().as_text()
    sent = collections.Counter[str]()
    for each in collectives(text):
        sent[each.kind] += each.moved_bytes
    return dict(sent)


@functools.cache
def of_adamw() -> dict[str, int]:
    return moved(optax.adamw(1e-3))


def scaled_by_trust_ratio() -> Any:
    """Adam's updates, scaled by norms that are computed from vectors."""

    def norm(x: jax.Array) -> Any:
        return jnp.linalg.norm(x.ravel())

    def update(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, p: u * norm(p) / (1 + norm(u)), updates, params)

    return optax.chain(optax.scale_by_adam(), optax.stateless(update), optax.scale(-1e-3))


WITH_DOT_PRODUCTS: dict[str, Callable[[], Any]] = {
    "prodigy": optax.contrib.prodigy,
    "mechanize": lambda: optax.contrib.mechanize(optax.adamw(1e-3)),
    "trust_ratio": scaled_by_trust_ratio,
    "lbfgs": lambda: optax.chain(optax.scale_by_lbfgs(), optax.scale(-1e-3)),
}


@pytest.mark.parametrize("name", WITH_DOT_PRODUCTS)
def test_sends_what_adamw_sends(name: str) -> None:
    sent, expected = moved(WITH_DOT_PRODUCTS[name]()), of_adamw()
    further = {kind: n - expected.get(kind, 0) for kind, n in sent.items()}
    assert 0 < further.pop("all-reduce") < NUMBERS
    assert not any(further.values())
