"""Quantized gradients whose errors are fed back: the numbers, poison, skipped steps."""

import functools
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from swept import swept

import zerojax
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.config.keys.loco import Loco
from zerojax.experimental.loco import ErrorFeedback
from zerojax.plan import layout
from zerojax.plan.quantized import Quantization, Sent, block_of_slice

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDTH, N, RATE = 32, 96, 8, 0.5
LOCO = {"err_beta": 0.8, "reset_T": 1024}


def params() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"table": (192, WIDTH), "stack": (2, WIDTH, WIDTH), "bias": (2, WIDTH)}
    return {
        name: 0.3 * rng.normal(size=shape).astype(np.float32)
        for name, shape in (shapes | {"head": (WIDTH, 192)}).items()
    }


def batch(seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(192, size=(ROWS, 3), dtype=np.int32),
        "y": rng.normal(size=(ROWS, 192)).astype(np.float32),
        "weight": np.ones(ROWS, np.float32),
    }


def loss(p: Any, b: Any) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> Any:
        return h + jnp.tanh(h @ w[0] + w[1]), None

    h, _ = lax.scan(jax.checkpoint(layer), p["table"][b["x"]].mean(1), (p["stack"], p["bias"]))
    each = ((h @ p["head"] - b["y"]) ** 2).mean(-1)
    return (each * b["weight"]).mean()


def step(state: TrainState, b: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(state.params, b)
    return state.apply_gradients(grads=grads), {"loss": value, "rows": b["y"] * 2}


def start(tx: Any = None) -> TrainState:
    return TrainState.create(apply_fn=None, params=params(), tx=tx or optax.sgd(RATE))


def zero_of(stage: int, k: int = 1, loco: Any = LOCO, **more: Any) -> zerojax.Zero:
    return zerojax.zero(
        stage=stage,
        gradient_accumulation_steps=k,
        stage3_param_persistence_threshold=0,
        zero_quantized_gradients=True,
        zeropp_loco_param=loco,
        **more,
    )


gradient = jax.jit(jax.grad(loss))


@functools.partial(jax.jit, static_argnames=("block", "form"))
def coded(x: jax.Array, block: tuple[int, ...], form: Any) -> jax.Array:
    """The numbers that a device sends of an array."""
    return dequantize(*quantize(x, block, form), form, jnp.float32)


class OnOneDevice:
    """The same arithmetic on one device: gradients by shard, quantized with their errors."""

    def __init__(self, k: int, loco: Loco) -> None:
        self.k, self.loco, self.how = k, loco, Quantization("int8")
        self.params, self.updates = jax.tree.map(jnp.asarray, params()), 0
        self.errors: dict[str, Any] = {}

    def step(self, b: Any) -> None:
        # In each micro-batch every device has its share of the rows.
        rows = np.arange(ROWS).reshape(self.k, N, -1).swapaxes(0, 1).reshape(N, -1)
        own = [{name: x[r] for name, x in b.items()} for r in rows]
        grads = [jax.tree.map(lambda g: g / N, gradient(self.params, each)) for each in own]
        self.updates += 1
        self.params = {
            name: p - RATE * self._sum(name, [g[name] for g in grads])
            for name, p in self.params.items()
        }

    def _sum(self, name: str, parts: list[jax.Array]) -> jax.Array:
        if name == "bias":
            return sum(parts)  # type: ignore[return-value]
        at = {"table": 0, "stack": 1, "head": 1}[name]  # what the devices have pieces of
        moved = [jnp.moveaxis(g, at, 0) for g in parts]
        block = block_of_slice(moved[0].shape, N, self.how)
        assert block is not None
        errors = self.errors.get(name, [jnp.zeros_like(g) for g in moved])
        total, after, beta = jnp.zeros_like(moved[0]), [], self.loco.err_beta
        for g, e in zip(moved, errors, strict=True):
            sent = coded(g + e, block, self.how.format)
            total += sent
            after.append(beta * e + (1 - beta) * (g + e - sent))
        if self.updates % self.loco.reset_T == 0:
            after = [jnp.zeros_like(e) for e in after]
        self.errors[name] = after
        return jnp.moveaxis(total, 0, at)


def assert_close(got: Any, want: Any, step_size: float) -> None:
    """Equal but for codes that rounding turns, which are few, by one step."""
    apart = np.abs(np.asarray(got) - np.asarray(want))
    assert apart.max() <= step_size
    assert np.mean(apart > 2e-5) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "k"), swept(product([3, 2, 1], [1, 4])))
def test_the_numbers_of_the_formula(stage: int, k: int) -> None:
    loco = Loco(err_beta=0.6, reset_T=3)
    zero, plain = zero_of(stage, k, loco), OnOneDevice(k, loco)
    train, state = zero(step), start()
    for i in range(4):  # the error of three is gone, that of one is there
        state, out = train(state, batch(i))
        plain.step(batch(i))
    np.testing.assert_array_equal(np.reshape(out["rows"], (ROWS, 192)), batch(3)["y"] * 2)
    error = state.tx.numbers.error
    assert error["bias"] == ()
    for name, want in plain.errors.items():
        assert_close(error[name][0], np.stack(want), 1e-2)
        assert np.abs(error[name][0]).max() > 0
    for name, want in plain.params.items():
        assert_close(state.params[name], want, 1e-2)


def test_every_third_error_is_zero() -> None:
    train, state = zero_of(1, loco={"err_beta": 0.6, "reset_T": 3})(step), start()
    largest = []
    for _ in range(3):
        state, _ = train(state, batch())
        largest.append(
            max(float(jnp.abs(e).max()) for e in jax.tree.leaves(state.tx.numbers.error))
        )
    assert min(largest[:2]) > 0
    assert largest[2] == 0


@pytest.mark.slow
def test_nnx_has_the_numbers_of_linen() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            for name, x in params().items():
                setattr(self, name, nnx.Param(jnp.asarray(x)))

    def nnx_step(model: Any, optimizer: Any, b: Any) -> jax.Array:
        def of(model: Any) -> jax.Array:
            return loss({name: getattr(model, name)[...] for name in params()}, b)

        value, grads = nnx.value_and_grad(of)(model)
        optimizer.update(model, grads)
        return value

    zero = zero_of(2)
    model = Model()
    optimizer = nnx.Optimizer(model, zero.wrap(optax.sgd(RATE)), wrt=nnx.Param)
    train, want = zero(nnx_step), zero_of(2)(step)
    state = start()
    for i in range(3):
        train(model, optimizer, batch(i))
        state, _ = want(state, batch(i))
    for name in params():
        np.testing.assert_allclose(getattr(model, name)[...], state.params[name], atol=1e-6)


@pytest.mark.parametrize(("stage", "poison"), swept(product([3, 1], [np.nan, np.inf, 1e38])))
def test_a_skipped_step_leaves_the_errors(stage: int, poison: float) -> None:
    train, state = zero_of(stage, check_finite=True)(step), start()
    state, _ = train(state, batch())
    before = jax.device_get((state.params, state.tx.numbers.error))
    bad = batch()
    bad["weight"][5] = poison  # of the second device alone
    state, _ = train(state, bad)
    assert int(state.tx.numbers.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.tx.numbers.error), before)
    state, out = train(state, batch())
    assert np.isfinite(out["loss"])
    assert int(state.tx.numbers.skipped) == 1


@pytest.mark.slow
@pytest.mark.parametrize("weight", swept([1e30, 0.0]))
def test_zeros_and_an_outlier_in_one_shard(weight: float) -> None:
    """No device's block takes the scale of another's."""
    train, state, plain = zero_of(2, check_finite=True)(step), start(), OnOneDevice(1, Loco())
    odd = batch()
    odd["weight"][4:8] = weight
    if weight:
        odd["weight"] = np.ones(ROWS, np.float32)
        odd["y"][5, 3] = 1e4
    state, _ = train(state, odd)
    plain.step(odd)
    for name, want in plain.params.items():
        scale = np.abs(want).max()
        assert_close(state.params[name] / scale, want / scale, 1e-2)


@pytest.mark.slow
def test_errors_are_without_the_loss_scale() -> None:
    more: dict[str, Any] = {"fp16": True, "initial_scale_power": 12, "loss_scale_window": 1}

    def scaled(state: TrainState, b: Any) -> Any:
        value, grads = zerojax.value_and_grad(loss)(state.params, b)
        return state.apply_gradients(grads=grads), value

    found = []
    for given in (more, {"fp16": True, "loss_scale": 1024.0}):
        train, state = zero_of(2, **given)(scaled), start()
        for i in range(3):
            state, _ = train(state, batch(i))
        assert int(state.tx.numbers.skipped) == 0
        found.append(np.asarray(state.tx.numbers.error["head"][0]))
    # Powers of two move no code, but for what fp16 cannot hold.
    assert np.mean(np.abs(found[0] - found[1]) > 1e-4 * np.abs(found[1]).max()) < 0.05


class OfTwoHosts(Gatherer):
    """Devices of which four are in a host."""

    near = 4  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("form", swept(["int4", "int8"]))
def test_between_hosts_the_second_error_is_fed_back_too(form: Any) -> None:
    sent = Sent(gradients=Quantization(form))
    gatherer = OfTwoHosts(zerojax.mesh(axes={"data": 8}), "data", keep=True, sent=sent)
    rng = np.random.default_rng(0)
    parts, spec = rng.normal(size=(8, 160, 96)).astype(np.float32), (None, "data")
    errors = [
        0.1 * rng.normal(size=shape).astype(np.float32) for shape in [(8, 96, 160), (8, 24, 160)]
    ]

    @jax.jit
    def run(parts: Any, errors: Any) -> Any:
        feedback = ErrorFeedback(Loco(err_beta=0.5), gatherer, [errors], jnp.array(0), None)
        return feedback.reduced(0, parts, spec), feedback.after[0]

    total, after = run(parts, errors)
    block = block_of_slice((96, 160), 8, sent.gradients)
    assert block is not None

    whole = np.moveaxis(parts, 2, 1) + errors[0]
    first = np.stack([coded(x, block, form) for x in whole])
    np.testing.assert_allclose(after[0], 0.5 * errors[0] + 0.5 * (whole - first), atol=1e-5)
    # Device 4 h + i has the pieces i and 4 + i of its host's sum.
    pieces = first.reshape(2, 4, 2, 4, 12, 160).sum(1).transpose(0, 2, 1, 3, 4).reshape(8, 24, 160)
    whole = pieces + errors[1]
    second = np.stack([coded(x, block, form) for x in whole])
    np.testing.assert_allclose(after[1], 0.5 * errors[1] + 0.5 * (whole - second), atol=1e-5)
    want = second.reshape(2, 4, 2, 12, 160).sum(0).transpose(1, 0, 2, 3).reshape(96, 160)
    np.testing.assert_allclose(total, want.T, atol=1e-4)
    assert layout.full(total.sharding.spec, 2) == spec


@pytest.mark.slow
def test_the_plan_says_what_errors_take() -> None:
    state = start()
    text = str(zero_of(2).plan(jax.eval_shape(functools.partial(jax.tree.map, jnp.asarray), state)))
    assert "each device holds the errors of its own gradients" in text
