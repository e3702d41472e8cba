"""Gradients that shrink after the sum over rows are reduced after they have shrunk."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emitted import check_step
from equal import zero_for
from flax.training.train_state import TrainState

import zerojax
from zerojax.collectives import Inserter, shrinking
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, POSITIONS, HEADS, BUCKETS, WIDTH = 16, 32, 2, 8, 16
Loss = Callable[[Any, jax.Array], jax.Array]


def bias(table: jax.Array) -> jax.Array:
    """[1, heads, positions, positions], by the distance of two positions."""
    distance = jnp.arange(POSITIONS)[:, None] - jnp.arange(POSITIONS)
    buckets = jnp.clip(distance + BUCKETS // 2, 0, BUCKETS - 1)
    return jnp.take(table, buckets, axis=0).transpose(2, 0, 1)[None]


def attended(scores: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkd->bqd", jax.nn.softmax(scores), x)


def scores(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bqd,hde,bke->bhqk", x, w.reshape(HEADS, WIDTH, WIDTH), x)


def one_layer(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(attended(scores(x, p["w"]) + bias(p["table"]), x) ** 2)


def shared_by_layers(p: Any, x: jax.Array) -> jax.Array:
    added = bias(p["table"])
    for _ in range(3):
        x = x + attended(scores(x, p["w"]) + added, x)
    return jnp.mean(x**2)


def indexed(p: Any, x: jax.Array) -> jax.Array:
    """By NumPy's indexing, and with half of the scores."""
    at = np.arange(POSITIONS) % BUCKETS
    added = p["table"][at[:, None] * at % BUCKETS]
    return jnp.mean(attended(0.5 * scores(x, p["w"]) + added.transpose(2, 0, 1), x) ** 2)


def by_row(p: Any, x: jax.Array) -> jax.Array:
    """Each row weighs the bias, and is not added up before."""
    weights = jnp.mean(x, axis=(1, 2))[:, None, None, None]
    return jnp.mean(attended(scores(x, p["w"]) + weights * bias(p["table"]), x) ** 2)


def penalized(p: Any, x: jax.Array) -> jax.Array:
    """What is added to the scores has a gradient of its own, which no rows are added up for."""
    added = bias(p["table"])
    return jnp.mean(attended(scores(x, p["w"]) + added, x) ** 2) + 0.1 * jnp.mean(added**2)


def backward(of_rows: Callable[..., jax.Array]) -> Loss:
    """A loss whose table has a gradient of its own making, computed from the sum over rows."""

    @jax.custom_vjp
    def added(table: jax.Array, scores: jax.Array) -> jax.Array:
        return scores + table[AT].transpose(2, 0, 1)[None]

    added.defvjp(
        lambda table, scores: (added(table, scores), None),
        lambda _, g: (of_rows(g.sum(0).transpose(1, 2, 0)), g),
    )
    return lambda p, x: jnp.mean(attended(added(p["table"], 9 * scores(x, p["w"])), x) ** 2)


AT = np.arange(POSITIONS**2).reshape(POSITIONS, POSITIONS) % BUCKETS
OWN = {
    "zeros": backward(lambda g: jnp.zeros((BUCKETS, HEADS)).at[AT].add(g)),
    "not zeros": backward(lambda g: jnp.ones((BUCKETS, HEADS)).at[AT].add(g)),
    "rounded to integers": backward(
        lambda g: jnp.zeros((BUCKETS, HEADS)).at[AT].add((100 * g).astype(int).astype(g.dtype))
    ),
    "as integers": backward(
        lambda g: jnp.zeros((BUCKETS, HEADS)).at[AT].add(g.astype(int).astype(g.dtype))
    ),
}


def of_positions(p: Any, x: jax.Array) -> jax.Array:
    """An entry for each position: the gradient does not shrink."""
    added = jnp.take(p["positions"], jnp.arange(POSITIONS), axis=0)
    return jnp.mean((x + added) ** 2)


def of_classes(p: Any, x: jax.Array) -> jax.Array:
    """A class for each row, and a sum over tokens, of which there are as many as rows."""
    tokens = jnp.tanh(x[:, : len(x)] @ p["w"][:WIDTH])
    classes = jnp.arange(len(x)) % 2
    return jnp.mean((tokens + jnp.take(p["positions"][:2], classes, axis=0)[:, None]) ** 2)


SHRINK = [one_layer, shared_by_layers, indexed, by_row, OWN.pop("zeros")]
OTHERS = [penalized, of_positions, of_classes, *OWN.values()]
NAMES = [f.__name__ for f in SHRINK[:4]], [f.__name__ for f in OTHERS[:3]]
LOSSES = pytest.mark.parametrize(
    "loss", [*SHRINK, *OTHERS], ids=[*NAMES[0], "zeros", *NAMES[1], *OWN]
)


def create() -> TrainState:
    draw = np.random.default_rng(0).normal
    params = {
        "w": draw(size=(HEADS * WIDTH, WIDTH)) / 4,
        "table": draw(size=(BUCKETS, HEADS)),
        "positions": draw(size=(POSITIONS, WIDTH)),
    }
    params = jax.tree.map(jnp.asarray, params)
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    return step


def rows(devices: int = 8) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2 * devices, POSITIONS, WIDTH))


@LOSSES
def test_which_ones(loss: Loss) -> None:
    x = rows()
    closed = jax.make_jaxpr(jax.grad(loss))(create().params, x)
    inserter = Inserter(zerojax.mesh(), "data", keep=True)
    wants = {v: (None,) * v.aval.ndim for v in closed.jaxpr.outvars}
    found = shrinking.find(closed.jaxpr, wants, len(x), inserter)
    table = closed.jaxpr.outvars[1]  # after "positions"
    assert found.ends == ({table} if loss in SHRINK else set())
    assert not shrinking.find(closed.jaxpr, wants, None, inserter).results
    assert not shrinking.find(closed.jaxpr, wants, len(x) - 1, inserter).results


@LOSSES
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.sweep), 3])
def test_the_numbers_of_plain_jit(loss: Loss, stage: int) -> None:
    check_step(zero_for(stage), step_of(loss), create, rows())


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_what_8_h100s_send() -> None:
    zero = zerojax.zero(stage=1, mesh=zerojax.topology("h100", 8))
    state = zero.abstract_state(create)
    x = jax.ShapeDtypeStruct((ROWS, POSITIONS, WIDTH), jnp.float32)
    lowered = zero(step_of(shared_by_layers)).lower(state, x)
    sent = sum(
        each.times * sum(each.bytes_by_dtype.values())
        for each in collectives(lowered.compile().as_text())
        if each.kind == "all-reduce"
    )
    everything = 4 * sum(v.size for v in jax.tree.leaves(jax.eval_shape(create).params))
    assert sent < everything + 100  # and the loss
    assert everything < 4 * HEADS * POSITIONS**2  # the bias
