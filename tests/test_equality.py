"""A decorated step computes what the plain one computes on one device, over many steps."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import assert_same, check, follow, plain, start, zero_for
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec
from programs import PROGRAMS
from programs.layouts import megatron_specs

import zerojax
from zerojax.models.gpt import loss_fn as cross_entropy
from zerojax.plan import layout, rule

pytestmark = pytest.mark.usefixtures("quick_compile")

P = PartitionSpec
STAGES = (0, 1, 2, 3)
STEPS = 20
# Stage 3, where all is sharded, stands for the others but in the sweep.
EACH_STAGE = [*(pytest.param(stage, marks=pytest.mark.sweep) for stage in STAGES[:-1]), 3]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["mlp", pytest.param("nnx_mlp", marks=pytest.mark.sweep)])
def test_twenty_steps(name: str, stage: int) -> None:
    """A plain state, placed when it first comes."""
    check(name, stage, steps=STEPS)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("full_compile")
@pytest.mark.parametrize("stage", STAGES)
def test_under_xlas_default_optimizations(stage: int) -> None:
    check("mlp", stage, 4, steps=STEPS)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *((name, 3) for name in ("mlp", "nnx_mlp")),
        *(
            pytest.param(name, 3, marks=pytest.mark.sweep)
            for name in ("gpt_dropout", "gpt_scan", "gpt_remat", "convnet", "tied", "masked", "odd")
        ),
    ],
)
def test_float32(name: str, stage: int) -> None:
    """The losses of a state that is created sharded."""
    program, zero, state = PROGRAMS[name], zero_for(stage), start(name, "float32")
    state = zero.init(lambda: state)
    got, want = follow(program, zero(program.step), state)[0], plain(name, "float32")[0]
    losses = [[float(metrics["loss"]) for metrics in run] for run in (got, want)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "partition", "shape", "spec"),
    [
        (8, 4, (12, 7), P("data:(2)4", "data:(1)2")),
        (6, 2, (7, 10), P("data:(1)3", "data:(3)2")),
        (6, 3, (8, 9), P("data:(1)2", "data:(2)3")),
        (8, 4, (7, 5), None),  # nothing divides: no secondary shard, which the plan says
    ],
)
def test_secondary_shards_of_padded_arrays(
    devices: int, partition: int, shape: Any, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "SMALL", 0)
    rng = np.random.default_rng(0)

    def create() -> TrainState:
        params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=shape))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def step(state: TrainState, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    with jax.enable_x64(True):
        zero = zero_for(3, axes=devices, zero_hpz_partition_size=partition)
        state, want = zero.init(create), create()
        plan = zero.plan(state)
        assert [leaf.spec for leaf in plan.leaves["params"]] == [spec or plan.params["w"]]
        assert len(plan.secondary()) == bool(spec)
        assert ("have no secondary shard" in str(plan)) != bool(spec)
        batches = rng.normal(size=(3, 2 * devices, shape[0]))
        one, plain_one = zero(step), jax.jit(step)
        for batch in batches:
            state, loss = one(state, batch)
            want, plain_loss = plain_one(want, batch)
            np.testing.assert_allclose(loss, plain_loss, rtol=1e-9)
        np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-9)
        evaluated = zero.evaluate(lambda state, x: x @ state.params["w"])(state, batches[0])
        np.testing.assert_allclose(evaluated, batches[0] @ want.params["w"], rtol=1e-9)


# Of three layers, bias before kernel. A bias that "model" shards is sharded again.
BOTH = ("model", "data")
USERS = [P("model"), P(None, "model"), P(), P("model"), P("model"), P(None, "model")]
USERS_AND_ZEROS = [
    P(BOTH), P("data", "model"), P("data"), P("model", "data"), P(BOTH), P("data", "model"),
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["partitioned", "logical", "nnx_partitioned"])
def test_users_own_specs_in_the_model(name: str, stage: int) -> None:
    """The plan keeps "model" where the model has it, and ZeRO takes another dimension."""
    zero = zero_for(stage, axes={"data": 2, "model": 4})
    specs = jax.tree.leaves(zero.plan(start(name, "float32")).params, is_leaf=is_spec)
    assert specs == (USERS if stage == 0 else USERS_AND_ZEROS)


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


@pytest.mark.parametrize("name", ["gpt", "gpt_scan_remat"])
def test_users_own_specs_given(name: str) -> None:
    state = start(name, "float32")
    specs = megatron_specs(state.params)
    zero = zero_for(3, axes={"data": 2, "model": 4}, specs=specs)
    planned = jax.tree.leaves(zero.plan(state).params, is_leaf=is_spec)
    for mine, spec in zip(jax.tree.leaves(specs, is_leaf=is_spec), planned, strict=True):
        n = max(len(mine), len(spec))
        assert layout.without(layout.full(spec, n), "data") == layout.full(mine, n)


def test_small_tensors_are_replicated() -> None:
    """Under the default threshold stage 3 shards nothing of a model as small as this."""
    zero, state = zerojax.zero(stage=3), start("mlp", "float32")
    assert not any(leaf.sharded for leaf in zero.plan(state).leaves["params"])
    program = PROGRAMS["mlp"]
    assert_same(program, follow(program, zero(program.step), state), "float32")


@pytest.mark.parametrize("devices", [1, 2])
def test_fewer_devices(devices: int) -> None:
    check("mlp", axes=devices, dtype="float32")


def regression_loss(apply: Any, params: Any, batch: Any) -> jax.Array:
    return jnp.mean((apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def language_loss(apply: Any, params: Any, tokens: Any) -> jax.Array:
    return cross_entropy(apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])


@pytest.mark.parametrize("stage", EACH_STAGE)
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("momentum", regression_loss),
        pytest.param("gpt_scan_remat", language_loss, marks=pytest.mark.sweep),
    ],
)
def test_bfloat16(name: str, loss: Callable[..., jax.Array], stage: int) -> None:
    """Against mixed precision written by hand: bfloat16 compute, float32 masters and moments."""

    def low(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    @jax.jit
    def by_hand(state: Any, *arguments: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(state.apply_fn, p, *arguments))(
            low(state.params)
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return state.apply_gradients(grads=grads), {"loss": value}

    program, seen = PROGRAMS[name], set()

    def watched(state: Any, *arguments: Any) -> Any:
        seen.update(x.dtype for x in jax.tree.leaves(state.params))
        new, metrics = program.step(state, *arguments)
        seen.update(x.dtype for x in jax.tree.leaves(new.params))
        return new, metrics

    want = follow(program, by_hand, start(name, "float32"), steps=STEPS)
    zero, state = zero_for(stage, bf16=True), start(name, "float32")
    state = zero.init(lambda: state)
    got = follow(program, zero(watched), state, steps=STEPS)
    losses = [[float(metrics["loss"]) for metrics in run[0]] for run in (got, want)]
    np.testing.assert_allclose(*losses, rtol=1e-2)
    # Two runs that are rounded independently lie sqrt(2) times as far apart as each does from
    # the run in float32.
    off = optax.tree.norm(jax.tree.map(np.subtract, got[1], want[1]))
    exact = plain(name, "float32", steps=STEPS)[1]
    rounding = optax.tree.norm(jax.tree.map(np.subtract, want[1], exact))
    assert off < math.sqrt(2) * rounding, (off, rounding)
    assert rounding < 2e-2 * optax.tree.norm(want[1])
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(got[1]))
    assert seen == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_accumulated_in_float32() -> None:
    """Many small gradients after a large one would vanish in a bfloat16 sum."""

    def step(state: TrainState, rows: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jnp.sum(params["w"] * rows.astype(jnp.bfloat16), axis=-1))

        grads = jax.grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {}

    zero = zero_for(2, 64, bf16=True)
    params = {"w": np.zeros(8, np.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    rows = np.full((512, 8), 2.0**-9, np.float32)
    rows[:8] = 1.0
    state, _ = zero(step)(state, rows)
    np.testing.assert_allclose(state.params["w"], -rows.mean(0), rtol=1e-6)
