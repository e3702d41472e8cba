"""One reduction an update: what devices, and replica groups, add up on their own."""

from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax.training.train_state import TrainState
from jax import lax

import zerojax
from zerojax.accumulation.kinds import RowKind
from zerojax.accumulation.lanes import rows_of_all
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")
ROWS, WIDTH, K = 32, 16, 2
MESHES = {
    "8": {"data": 8},
    "2 groups of 4": {"replica": 2, "data": 4},
    "4 beside 2": {"data": 4, "model": 2},
}


def params() -> Any:
    rng = np.random.default_rng(0)
    return {
        "table": rng.normal(size=(32, WIDTH)),
        "stack": rng.normal(size=(3, WIDTH, WIDTH)),
        "filter": rng.normal(size=(3, WIDTH, WIDTH)),
        "head": rng.normal(size=(WIDTH, 4)),
    }


def batch() -> Any:
    rng = np.random.default_rng(1)
    return {
        "x": rng.integers(32, size=(ROWS, 5)),
        "y": rng.normal(size=(ROWS, 4)),
        "mask": rng.integers(2, size=ROWS),
    }


def apply(p: Any, x: jax.Array) -> jax.Array:
    h = p["table"][x].mean(1)
    h, _ = lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), h, p["stack"])
    return h @ p["head"]


def mean(p: Any, b: Any) -> jax.Array:
    return jnp.mean((apply(p, b["x"]) - b["y"]) ** 2)


def masked(p: Any, b: Any) -> jax.Array:
    each = jnp.sum((apply(p, b["x"]) - b["y"]) ** 2, -1)
    return jnp.sum(each * b["mask"]) / jnp.sum(b["mask"])


def convolved(p: Any, b: Any) -> jax.Array:
    h = lax.conv_general_dilated(
        p["table"][b["x"]], p["filter"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.mean((jnp.tanh(h).mean(1) @ p["head"] - b["y"]) ** 2)


def noisy(p: Any, b: Any) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, b["y"].shape)
    return jnp.mean(jnp.where(keep, apply(p, b["x"]) - b["y"], 0) ** 2)


def step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[[TrainState, Any], Any]:
    def step(state: TrainState, b: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, b)
        out = apply(state.params, b["x"])
        tops = {"largest": out.max(), "hits": (out > 0).sum(), "rows": out}
        return state.apply_gradients(grads=grads), {"loss": value, **tops}

    return step


def start() -> TrainState:
    return TrainState.create(apply_fn=None, params=params(), tx=optax.adam(1e-2))


def zero_of(stage: int, mesh: str) -> zerojax.Zero:
    return zero_for(stage, k=K, mesh=zerojax.mesh(axes=MESHES[mesh]))


def most_reductions(
    stage: int, mesh: str, loss: Callable[[Any, Any], jax.Array], between: int
) -> int:
    """How often in a step the gradient of a matrix is reduced over ``between`` devices, at most."""
    with jax.set_mesh(zerojax.mesh(axes=MESHES[mesh])):
        lowered = zero_of(stage, mesh)(step_of(loss)).lower(start(), batch())
    text = lowered.compile().as_text()
    return max(
        each.times
        for each in collectives(text)
        if each.kind in ("all-reduce", "reduce-scatter")
        and each.group_size == between
        and any(len(shape.dims) > 1 for shape in each.shapes)
    )


AT = [
    (0, "8"),
    (1, "8"),
    (1, "2 groups of 4"),
    (2, "2 groups of 4"),
    (3, "2 groups of 4"),
    (1, "4 beside 2"),
]


@pytest.mark.parametrize(("stage", "mesh"), AT)
@pytest.mark.parametrize("loss", [mean, masked])
def test_exactly(stage: int, mesh: str, loss: Callable[[Any, Any], jax.Array]) -> None:
    source = emitted.Source(start, step_of(loss), (emitted.in_float32(batch()),))
    emitted.check(source, stage, K, zerojax.mesh(axes=MESHES[mesh]))


@pytest.mark.parametrize(
    ("stage", "mesh", "loss"),
    [
        (1, "4 beside 2", masked),
        (3, "2 groups of 4", convolved),
    ],
)
def test_compiled(stage: int, mesh: str, loss: Callable[[Any, Any], jax.Array]) -> None:
    step = step_of(loss)
    with jax.set_mesh(zerojax.mesh(axes=MESHES[mesh])):
        want, found = jax.jit(step)(start(), batch())
        got, mine = zero_of(stage, mesh)(step)(start(), batch())
    mine["rows"] = mine["rows"].reshape(ROWS, -1)
    for a, b in zip(
        jax.tree.leaves((got.params, mine)), jax.tree.leaves((want.params, found)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("stage", "mesh", "between", "loss"),
    [(3, "2 groups of 4", 2, masked), (1, "8", 8, mean)],
)
def test_one_reduction_an_update(
    stage: int, mesh: str, between: int, loss: Callable[[Any, Any], jax.Array]
) -> None:
    assert most_reductions(stage, mesh, loss, between) == 1


def test_lanes_send_the_dtype_of_the_gradients() -> None:
    zero = zerojax.zero(stage=1, bf16=True, gradient_accumulation_steps=K)
    rows = zero(step_of(mean)).collectives(start(), emitted.in_float32(batch())).rows
    sent = [each for each in rows if each.kind != "all-gather" and len(each.shape) > 1]
    assert {each.dtype for each in sent} == {"bfloat16"}
    assert {each.where for each in sent} == {"after the loop"}


def test_rows_in_several_stretches_keep_their_order() -> None:
    """A result that holds all rows twice, as ``jnp.concatenate([x, 10 + x])`` does."""
    rows = np.arange(6)
    lanes = jnp.stack([np.concatenate([x, 10 + x]) for x in np.split(rows, 2)])
    found = rows_of_all(lanes, RowKind("rows", dim=0, outer=2))
    np.testing.assert_array_equal(found, np.concatenate([rows, 10 + rows]))


def test_one_a_micro_batch_where_devices_cannot_work_apart() -> None:
    assert most_reductions(1, "8", noisy, 8) > 1
