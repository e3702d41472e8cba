"""Small parameters: one all-gather for all of them, at every stage that cuts them."""

from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jaxprs import gathers

import zerojax
from zerojax.collectives import Shard, kept, many
from zerojax.collectives.insert import Inserter
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
ROWS = 16
SHAPES = [(8,), (2, 8), (8, 3), (3, 8, 2)]
SPECS = [("data",), (None, "data"), ("data", None), (None, "data", None)]


def test_each_comes_back_as_it_was() -> None:
    values = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(SHAPES)]
    values += [x.astype(np.float16) for x in values]
    inserter = Inserter(MESH, "data", keep=False)

    def run(values: list[jax.Array]) -> Any:
        shards = [Shard(x, spec) for x, spec in zip(values, SPECS * 2, strict=True)]
        return many.gather_together(shards, MESH, inserter.constrain)

    with jax.enable_x64(True):
        assert [move.dtype for move in gathers(jax.make_jaxpr(run)(values))] == [
            "float64",
            "float16",
        ]
        for got, want in zip(jax.jit(run)(values), values, strict=True):
            assert got.sharding.is_fully_replicated
            np.testing.assert_array_equal(got, want)


def test_what_is_made_of_a_small_one_is_not_gathered_again() -> None:
    """A cast to the dtype of a layer, a transpose, a rematerialised block, a loop."""
    inserter = Inserter(MESH, "data", keep=False)

    @jax.checkpoint
    def block(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ (w.astype(jnp.float16) * 2).T)

    def layers(w: Any, x: Any) -> Any:
        x = jax.lax.scan(lambda x, _: (block(w, x), None), block(w, x), None, length=2)[0]
        return x.astype(jnp.float32).sum()

    def run(w: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(jax.grad(layers))(w, x)
        shard = [Shard(w, ("data", None))]
        return inserter(closed, [*kept.gather(shard, kept.by_plan(shard, inserter), inserter), x])

    found = gathers(jax.make_jaxpr(run)(np.ones((8, 8), "f4"), np.ones((ROWS, 8), "f2")))
    assert [move.inside for move in found] == [()]


class Many(nn.Module):
    """Scales one after the other and side by side."""

    leaves: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        ones = nn.initializers.ones
        scales = [self.param(f"scale_{i:03}", ones, (8,)) for i in range(self.leaves)]
        for scale in scales[:4]:
            x = jnp.tanh(x * scale)
        return sum((jnp.mean((x @ scale - 1) ** 2) for scale in scales), start=jnp.zeros(()))


def step(state: TrainState, x: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(lambda p: state.apply_fn({"params": p}, x))(state.params)
    return state.apply_gradients(grads=grads), loss


def creating(leaves: int) -> Any:
    model = Many(leaves)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.ones((1, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    return create


def zero_for(stage: int, **more: Any) -> zerojax.Zero:
    return zerojax.zero(stage=stage, stage3_param_persistence_threshold=0, **more)


def sent(stage: int, leaves: int, **more: Any) -> tuple[Counter[str], Counter[str]]:
    """Collectives of a compiled step by kind, and the bytes that they move."""
    zero, key = zero_for(stage, **more), jax.random.key(0)
    shapes = zero.abstract_state(creating(leaves), key), jax.ShapeDtypeStruct((ROWS, 8), "float32")
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for each in collectives(zero(step).lower(*shapes).compile().as_text()):
        counts[each.kind] += each.times
        moved[each.kind] += each.moved_bytes
    return counts, moved


@pytest.mark.parametrize(
    ("stage", "more"), [(3, {"gradient_accumulation_steps": 2}), (1, {"bf16": True})]
)
def test_one_gather_for_all(stage: int, more: dict[str, Any]) -> None:
    counts, moved = sent(stage, 12, **more)
    assert counts["all-gather"] == 1
    assert moved["all-gather"] == 12 * 8 * 4 * 7 / 8  # XLA for CPU gathers bf16 as float32


def test_the_numbers_and_the_cut_stay() -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 8))
    with jax.enable_x64(True):
        zero, key = zero_for(3), jax.random.key(0)
        state, plain = zero.init(creating(6), key), creating(6)(key)
        decorated, jitted = zero(step), jax.jit(step)
        for _ in range(3):
            state, loss = decorated(state, x)
            plain, want = jitted(plain, x)
            np.testing.assert_allclose(loss, want, rtol=1e-9)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True):
            assert a.addressable_shards[0].data.size == a.size // 8
            np.testing.assert_allclose(a, b, rtol=1e-9)
