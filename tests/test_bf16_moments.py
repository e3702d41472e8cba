"""``bf16_optimizer_states`` in steps: equal wherever the state is, skipped, saved and counted."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint.states import KEY, create_linen, create_nnx, filled, values
from equal import zero_for
from flax import nnx
from flax.training.train_state import TrainState
from tiers import rest_in_a_sweep

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.hlo.traffic import collectives
from zerojax.models import names

LOW: dict[str, Any] = {"bf16": True, "bf16_optimizer_states": True}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
ULP = 2.0**-7  # at most, relative to the value
BATCHES = np.random.default_rng(0).normal(size=(5, 32, 16)).astype(np.float32)


def create(tx: Any = None) -> TrainState:
    """A network, a parameter that no optimizer below trains, and one that 8 devices do not cut."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "first": jax.random.normal(keys[0], (16, 44)) / 4,
        "second": jax.random.normal(keys[1], (44, 8)) / 6,
        "odd": jnp.full((3, 5), 0.5),
        "frozen": jnp.ones(8),
    }
    rules = {"train": tx or optax.adamw(1e-2), "keep": optax.set_to_zero()}
    labels = {name: "keep" if name == "frozen" else "train" for name in params}
    return TrainState.create(apply_fn=None, params=params, tx=optax.partition(rules, labels))


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    out = jnp.tanh(x.astype(params["first"].dtype) @ params["first"]) @ params["second"]
    penalty = jnp.sum(jnp.square(params["odd"].astype(jnp.float32) - 1))
    return jnp.mean(jnp.square((out * params["frozen"]).astype(jnp.float32) - 1)) + penalty


def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state.params, x)
    return state.apply_gradients(grads=grads), loss


def run(zero: zerojax.Zero, state: Any = None, body: Any = step) -> Any:
    state, decorated = state or zero.init(create), zero(body)
    for x in BATCHES:
        state, _ = decorated(state, x)
    return state


def moments(state: Any) -> dict[str, np.ndarray]:
    """``mu`` and ``nu`` of each parameter on the host, by name."""
    opt_state = getattr(state, "opt_state", state)
    return {
        f"{name} {key}": np.asarray(x)
        for name in ("mu", "nu")
        for _, tree in optax.tree.get_all_with_path(opt_state, name)
        for key, x in nnx.as_pure(tree).items()
        if not isinstance(x, optax.MaskedNode)
    }


def assert_near(state: Any, want: dict[str, np.ndarray], parts: float) -> None:
    """A rounding apart in a few elements: float32 sums differ in their last bit."""
    got = moments(state)
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == want[name].dtype == jnp.bfloat16
        a, b = x.astype(np.float32), want[name].astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=4 * ULP, atol=1e-2 * np.abs(b).max(), err_msg=name)
        assert np.mean(a != b) <= parts, name


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    """The moments of one device at stage 0."""
    return moments(run(zero_for(0, axes=1, **LOW)))


PLACES: dict[str, dict[str, Any]] = {
    "4 devices": {"stage": 2, "axes": 4},
    "host": {"stage": 3, "offload_optimizer": "cpu", "sub_group_size": 220},
    "stage 3": {"stage": 3},
    "stage 1": {"stage": 1},
    "all on the host": {
        "stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "sub_group_size": 220,
    },
    "disk": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "sub_group_size": 220},
}  # fmt: skip


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("place", rest_in_a_sweep(PLACES, 3))
def test_the_same_everywhere(place: str, alone: dict[str, np.ndarray], tmp_path: Path) -> None:
    keywords = PLACES[place]
    if place == "disk":
        keywords = keywords | {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    assert_near(run(zero_for(**keywords, **LOW)), alone, 0.1)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("k", [1, 4])
def test_near_the_moments_in_float32(k: int) -> None:
    stored, exact = (run(zero_for(3, k, **low)) for low in (LOW, {"bf16": True}))
    got = moments(stored)
    for name, x in moments(exact).items():
        assert (got[name].dtype, x.dtype) == (jnp.bfloat16, np.float32)
        near = 2 * len(BATCHES) * ULP * np.abs(x).max()
        np.testing.assert_allclose(got[name].astype(np.float32), x, atol=near, err_msg=name)
    for a, b in zip(*(jax.tree.leaves(s.params) for s in (stored, exact)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * 1e-2 * len(BATCHES))


def is_low(state: Any) -> bool:
    """Whether all moments are in bfloat16, and no longer zeros."""
    found = moments(state).values()
    return bool(found) and all(x.dtype == jnp.bfloat16 and x.any() for x in found)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    "kind", rest_in_a_sweep(["AdamW", "Lamb", "Adam", "FusedAdam", "CPUAdam"], 2)
)
def test_the_optimizers_of_the_json(kind: str) -> None:
    config = {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "optimizer": {"type": kind}}
    zero = zerojax.zero(config | {"scheduler": {"type": "WarmupLR"}})
    params = create().params
    state = zero.init(lambda: TrainState.create(apply_fn=None, params=params, tx=zero.optimizer()))
    assert is_low(run(zero, state))


@pytest.mark.usefixtures("quick_compile")
def test_a_state_of_one_device_is_rounded() -> None:
    """Its parameters become float32, its moments bfloat16, and the caller's arrays live on."""
    made = create()
    made = made.replace(
        params=optax.tree.cast(made.params, jnp.bfloat16),
        opt_state=jax.tree.map(lambda x: x + jnp.asarray(1.003, x.dtype), made.opt_state),
    )
    zero = zero_for(3, **LOW)
    state, _ = zero(step)(made, BATCHES[0])
    assert is_low(state)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    assert all(x.dtype == np.float32 for x in moments(made).values())


@pytest.mark.usefixtures("quick_compile")
def test_nnx_and_any_pytree() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            params = create().params
            self.first, self.second = (nnx.Param(params[name]) for name in ("first", "second"))

    def nnx_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        def loss(model: Model) -> jax.Array:
            return jnp.mean(jnp.square(jnp.tanh(x @ model.first[...]) @ model.second[...]))

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def objects() -> tuple[Model, nnx.Optimizer]:
        model = Model()
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    zero = zero_for(3, **LOW)
    model, optimizer = zero.init(objects)
    zero(nnx_step)(model, optimizer, BATCHES[0])
    assert is_low(optimizer)

    tx = zero.wrap(optax.adamw(1e-2))

    def update(params: Any, opt_state: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = zero.init(lambda: (create().params, tx.init(create().params)))
    _, opt_state = zero(update)(params, opt_state, BATCHES[0])
    assert is_low(opt_state.inner)


@pytest.mark.usefixtures("quick_compile")
def test_updates_in_a_loop() -> None:
    """Rounded after each update, as in single steps."""
    zero = zero_for(3, **LOW)

    def loop(state: TrainState, batches: jax.Array) -> Any:
        return jax.lax.scan(step, state, batches)

    state, _ = zero(loop, batch_axis=1)(zero.init(create), BATCHES)
    assert_near(state, moments(run(zero)), 0.1)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("keywords", [{}, PLACES["host"]], ids=["device", "host"])
def test_a_skipped_step_changes_no_bit(keywords: dict[str, Any]) -> None:
    zero = zero_for(**({"stage": 3} | keywords), **LOW, check_grad_overflow=True)
    state, decorated = run(zero), zero(step)
    before = moments(state)
    spoilt = BATCHES[0].copy()
    spoilt[3, 2] = np.nan
    state, _ = decorated(state, spoilt)
    assert int(zerojax.telemetry(state)["skipped_steps"]) == 1
    for name, x in moments(state).items():
        assert x.tobytes() == before[name].tobytes(), name


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("form", rest_in_a_sweep([create_linen, create_nnx], 1))
@pytest.mark.parametrize("origin", ["fp32", "bf16"])
def test_a_checkpoint_has_either_moments(form: Any, origin: str, tmp_path: Path) -> None:
    """From 8 devices at stage 3 to 4 at stage 1, moments in float32 to bfloat16, and back."""
    low, exact = zero_for(3, **LOW), zero_for(1, axes=4, bf16=True)
    first, second = (low, exact) if origin == "bf16" else (exact, low)
    state = filled(first.init(form, KEY))
    with Checkpointer(tmp_path, first) as checkpointer:
        checkpointer.save(1, state)
    with Checkpointer(tmp_path, second, read_only=True) as checkpointer:
        got = values(checkpointer.restore(second.abstract_state(form, KEY)))
    wanted, fresh = values(state), values(second.init(form, KEY))
    low_names = {
        n for n, x in (wanted if origin == "bf16" else fresh).items() if x.dtype.itemsize == 2
    }
    assert low_names == {name for name in wanted if {"mu", "nu"} & {*name.split(".")}}
    for name, x in got.items():
        assert x.dtype == fresh[name].dtype, name
        np.testing.assert_array_equal(x, wanted[name].astype(x.dtype), err_msg=name)


def test_bytes_of_a_7b() -> None:
    """`zerojax plan --model llama-7b --devices h100:8` has them too: 8P/N in place of 12P/N."""
    model = names.llama_7b()
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    for low, each in ((LOW, 8), ({"bf16": True}, 12)):
        zero = zerojax.zero(stage=3, mesh=zerojax.topology("h100", 8), optimizer=ADAMW, **low)
        made = partial(TrainState.create, apply_fn=None, tx=zero.optimizer())
        state = jax.eval_shape(lambda p, made=made: made(params=p), params)
        assert zero.plan(state).bytes_per_device == pytest.approx(each * count / 8, rel=1e-3)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_nothing_more_is_sent_on_gpus() -> None:
    """The noise is drawn where the shard is."""
    sent, texts = [], []
    for low in (LOW, {"bf16": True}):
        zero = zero_for(3, mesh=zerojax.topology("h100", 8), **low)
        batch = jax.ShapeDtypeStruct((32, 16), "float32")
        texts.append(zero(step).lower(zero.abstract_state(create), batch).compile().as_text() or "")
        found = collectives(texts[-1])
        sent.append(sorted((x.kind, x.dtypes, x.times, x.payload_bytes) for x in found))
    assert sent[0] == sent[1]
    assert "u32[16,44]" not in texts[0]  # of all shards
    assert "u32[" in texts[0]
