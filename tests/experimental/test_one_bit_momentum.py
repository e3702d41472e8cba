"""1-bit Adam: warm-up, the compressed mean, refusals, traffic."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from swept import swept

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.collectives.gathering import Gatherer
from zerojax.config import ConfigError
from zerojax.experimental.one_bit_mean import mean_in_one_bit, pack, signs, unpack
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, N, RATE, FREEZE = 32, 8, 1e-3, 3


def create(tx: Any) -> TrainState:
    rng = np.random.default_rng(0)
    shapes = {"first": (60, 151), "last": (151, 90), "bias": (90,)}
    params = {k: 0.1 * rng.normal(size=v).astype(np.float32) for k, v in shapes.items()}
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(ROWS, 60)), rng.normal(size=(ROWS, 90))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def loss(p: Any, b: Any) -> jax.Array:
    h = jnp.tanh(b["x"] @ p["first"])
    return jnp.mean((h @ p["last"] + p["bias"] - b["y"]) ** 2)


def step(state: TrainState, b: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(state.params, b)
    return state.apply_gradients(grads=grads), value


def config(k: int = 1, **params: Any) -> dict[str, Any]:
    params = {"lr": RATE, "freeze_step": FREEZE, "weight_decay": 0.01} | params
    optimizer = {"type": "OneBitAdam", "params": params}
    return {"gradient_clipping": 0, "gradient_accumulation_steps": k, "optimizer": optimizer}


def sign(x: Any) -> Any:
    return np.where(x >= 0, 1, -1).astype(np.float32)


def compressed(rows: Any, worker: Any, server: Any) -> Any:
    """The mean of rows as DeepSpeed's ``compressed_allreduce`` has it, without its padding."""
    n, size = rows.shape
    piece = server.shape[1]
    sent = np.zeros((n, n * piece), np.float32)
    for i in range(n):
        whole = rows[i] + worker[i, :size]
        scale = np.linalg.norm(whole) / np.sqrt(size)
        sent[i, :size] = scale * sign(whole)
        worker[i, :size] = whole - sent[i, :size]
    out = np.zeros(n * piece, np.float32)
    for i in range(n):
        here = slice(i * piece, min((i + 1) * piece, size))
        count = max(here.stop - here.start, 0)
        if count:
            mean = sent[:, here].mean(0) + server[i, :count]
            scale = np.linalg.norm(mean) / np.sqrt(count)
            out[here] = scale * sign(mean)
            server[i, :count] = mean - out[here]
    return out[:size]


@pytest.mark.parametrize("size", [8192, 9000, 70])
def test_the_mean_of_the_original(size: int) -> None:
    gatherer = Gatherer(zerojax.mesh(axes={"data": N}), "data", keep=True)
    rng, piece = np.random.default_rng(size), -(-size // (8 * N)) * 8
    rows = rng.normal(size=(N, size)).astype(np.float32)
    worker, server = np.zeros((N, N * piece), np.float32), np.zeros((N, piece), np.float32)
    errors: Any = (worker.copy(), server.copy())
    run = jax.jit(lambda rows, errors: mean_in_one_bit(rows, errors, gatherer))
    for _ in range(3):
        want = compressed(rows, worker, server)
        got, errors, _ = run(rows, errors)
        np.testing.assert_allclose(got, want, atol=1e-5)
        np.testing.assert_allclose(errors[0], worker, atol=1e-4)
        np.testing.assert_allclose(errors[1], server, atol=1e-4)


def test_bits_are_the_signs() -> None:
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    x[0, :3] = 0, -0.0, np.finfo(np.float32).tiny
    assert pack(jnp.asarray(x)).shape == (3, 5)
    np.testing.assert_array_equal(unpack(pack(jnp.asarray(x))), signs(jnp.asarray(x)))


@pytest.mark.parametrize(("stage", "k"), swept([(1, 1), (0, 4), (0, 1)]))
def test_warm_up_is_adamw_and_then_the_formula(stage: int, k: int) -> None:
    zero = zerojax.zero(config(k) | {"zero_optimization": {"stage": stage}})
    train, state = zero(step), create(zero.optimizer())
    plain = jax.jit(step)
    want = create(optax.adamw(RATE, weight_decay=0.01))
    for i in range(FREEZE):
        state, _ = train(state, batch(i))
        want, _ = plain(want, batch(i))
    for name, x in want.params.items():
        np.testing.assert_allclose(state.params[name], x, atol=2e-6)
    adam = want.opt_state[0]
    m, v = (jax.tree.map(np.array, x) for x in (adam.mu, adam.nu))
    params = jax.tree.map(np.array, want.params)
    errors = {
        name: (np.zeros((N, N * p), np.float32), np.zeros((N, p), np.float32))
        for name, x in params.items()
        if name != "bias"
        for p in [-(-x.size // (8 * N)) * 8]
    }
    for i in range(FREEZE, FREEZE + 3):
        state, _ = train(state, batch(i))
        rows = np.arange(ROWS).reshape(k, N, -1).swapaxes(0, 1).reshape(N, -1)
        own = [{name: x[r] for name, x in batch(i).items()} for r in rows]
        grads = [jax.grad(loss)(params, each) for each in own]
        for name, p in params.items():
            local = np.stack([0.9 * m[name] + 0.1 * g[name] for g in grads]).reshape(N, -1)
            mean = local.mean(0) if name == "bias" else compressed(local, *errors[name])
            m[name] = mean.reshape(p.shape)
            root = np.sqrt(v[name] / (1 - 0.999**FREEZE)) + 1e-8
            params[name] = p - RATE * (m[name] / (1 - 0.9 ** (i + 1)) / root + 0.01 * p)
    for name, x in params.items():
        # Where a sum is all but zero its sign is rounding's.
        apart = np.abs(np.asarray(state.params[name]) - x)
        assert np.mean(apart > 1e-4) < 0.01
        if name != "bias":
            lost = np.abs(np.asarray(state.tx.numbers.error[name][0]) - errors[name][0])
            assert np.mean(lost > 1e-5) < 0.01


def test_what_was_never_seen_stays() -> None:
    """Signs have no zero: without a variance there is no momentum."""
    zero = zerojax.zero(config(weight_decay=0.0))
    train, state = zero(step), create(zero.optimizer())
    dead = [batch(i) for i in range(FREEZE + 3)]
    for each in dead:
        each["x"][:, 7] = 0
        state, _ = train(state, each)
    before = create(zero.optimizer()).params["first"]
    np.testing.assert_array_equal(state.params["first"][7], before[7])
    assert np.abs(state.params["first"][6] - before[6]).max() > 0


KINDS = {
    "OneBitAdam": {"lr": 3e-3, "freeze_step": 10},
    "OneBitLamb": {"lr": 0.1, "freeze_step": 10},
    "ZeroOneAdam": {
        "lr": 3e-3,
        "var_freeze_step": 25,
        "var_update_scaler": 4,
        "local_step_clipper": 1,
    },
}


@pytest.mark.parametrize("kind", swept(KINDS))
def test_it_trains(kind: str) -> None:
    optimizer = {"type": kind, "params": KINDS[kind]}
    zero = zerojax.zero({"gradient_clipping": 0, "optimizer": optimizer})
    train, state = zero(step), create(zero.optimizer())
    values = []
    for _ in range(40):
        state, value = train(state, batch(0))
        values.append(float(value))
    assert values[-1] < 0.7 * values[10], values


@pytest.mark.slow
@pytest.mark.parametrize("stage", swept([1, 0]))
def test_a_poisoned_shard_is_skipped_and_a_restart_goes_on(stage: int, tmp_path: Path) -> None:
    zero = zerojax.zero(config() | {"check_finite": True, "zero_optimization": {"stage": stage}})
    train, state = zero(step), zero.init(lambda: create(zero.optimizer()))
    for i in range(FREEZE + 2):
        state, _ = train(state, batch(i))
    before = jax.device_get((state.params, state.tx.numbers.error, state.opt_state))
    bad = batch(9)
    bad["y"][5] = np.nan
    state, _ = train(state, bad)
    after = jax.device_get((state.params, state.tx.numbers.error, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    with Checkpointer(tmp_path, zero) as ckpt:
        ckpt.save(1, state)
        restored = ckpt.restore(zero.abstract_state(lambda: create(zero.optimizer())))
    state, _ = train(state, batch(1))
    restored, _ = train(restored, batch(1))
    jax.tree.map(np.testing.assert_array_equal, state.params, restored.params)
    jax.tree.map(np.testing.assert_array_equal, state.tx.numbers.error, restored.tx.numbers.error)


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage is 2; set it to 1"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "leave out one of them",
        ),
        ({"gradient_clipping": 1.0}, "gradient_clipping = 1.0 would clip; set it to 0"),
    ],
)
def test_what_it_excludes(more: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        zerojax.zero(config() | more)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_bits_alone_are_sent_after_the_warm_up() -> None:
    zero = zerojax.zero(config(), mesh=zerojax.topology("h100", devices=8))
    state = zero.abstract_state(lambda: create(zero.optimizer()))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    text = zero(step).lower(state, shapes).compile().as_text()
    large = {
        (each.kind, str(shape.dtype))
        for each in collectives(text)
        for shape in each.shapes
        if np.prod(shape.dims) > 1000
    }
    assert large == {("all-reduce", "f32"), ("all-to-all", "u8"), ("all-gather", "u8")}
