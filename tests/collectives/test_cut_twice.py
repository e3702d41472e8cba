"""What a device sends, for eight H100s: a weight that is cut twice moves over "data" alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
from zerojax.hlo.traffic import Collective, collectives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

P = PartitionSpec
BOTH = ("tensor", "data")
WIDTH, WIDER = 1022, 4096  # the first is not divisible by 4


def moved() -> list[Collective]:
    """The collectives of two blocks on 4 x 2 devices, of 100 kB or more."""
    shape = (WIDTH, WIDER)
    axes = {"data": 4, "tensor": 2}
    mesh = zerojax.topology("h100", devices=8, axes=axes)

    @jax.checkpoint
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(x @ up) @ down

    def step(state: TrainState, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            out = block(block(x, *params[0]), *params[1])
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def create() -> TrainState:
        params = [(jnp.zeros(shape, "float32"), jnp.zeros(shape[::-1], "float32"))] * 2
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    zero = zerojax.zero(
        stage=3, mesh=mesh, bf16=True,
        specs=[(P(None, "tensor"), P("tensor"))] * 2,
    )  # fmt: skip
    state = zero.abstract_state(create)
    assert zero.plan(state).params[0] == (P(None, BOTH), P(BOTH))
    rows = jax.ShapeDtypeStruct((64, 256, WIDTH), jnp.bfloat16)
    text = zero(step).lower(state, rows).compile().as_text()
    return [each for each in collectives(text) if each.payload_bytes > 1e5]


def test_a_weight_that_is_cut_twice() -> None:
    found = moved()
    piece = WIDTH * WIDER // 2

    def sizes(kind: str) -> list[int]:
        shapes = [s for each in found if each.kind == kind for s in each.shapes * each.times]
        return [int(np.prod(s.dims)) for s in shapes]

    assert {each.kind for each in found} <= {"all-gather", "reduce-scatter", "all-reduce"}
    moves = [each for each in found if each.kind != "all-reduce"]
    assert {each.group_size for each in moves} == {4}
    assert set(sizes("all-gather")) == set(sizes("reduce-scatter")) == {piece}
    assert 4 <= len(sizes("all-gather")) <= 8  # the last weight's gradient needs no second one
    assert len(sizes("reduce-scatter")) == 4
    # What is all-reduced are activations, over "tensor".
    assert {each.group_size for each in found if each.kind == "all-reduce"} == {2}
    assert piece not in sizes("all-reduce")
