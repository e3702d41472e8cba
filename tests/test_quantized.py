"""ZeRO++'s quantized collectives: the numbers of the same arithmetic on one device."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.collectives.quantization import LARGEST, dequantize, quantize
from zerojax.plan.quantized import Quantization, block_of, block_of_slice

pytestmark = pytest.mark.usefixtures("quick_compile")

DEVICES, ROWS, TOKENS, WIDTH = 8, 32, 16, 128
INT8 = Quantization("int8")
BOTH = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
APART = 1e-5
"""Losses that differ by more were quantized differently; rounding in float32 differs by less."""
SLOW = pytest.mark.slow


class Model(nn.Module):
    """Tokens [rows, TOKENS] to [rows]: a table, perhaps a convolution, two dense layers."""

    conv: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(96, WIDTH)(tokens)
        x = nn.tanh(nn.Conv(WIDTH, (3,), name="conv")(x)) if self.conv else x
        x = nn.tanh(nn.Dense(2 * WIDTH, name="first")(x))
        return nn.Dense(WIDTH, name="second")(x).mean((1, 2))


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.normal(size=ROWS).astype(np.float32)
    return {"tokens": rng.integers(0, 96, (ROWS, TOKENS)).astype(np.int32), "y": y}


def loss_of(predicted: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((predicted - batch["y"]) ** 2)


def params_of(conv: bool = True) -> Any:
    return Model(conv).init(jax.random.key(0), jnp.zeros((1, TOKENS), jnp.int32))["params"]


def loss(params: Any, batch: Any) -> jax.Array:
    return loss_of(Model("conv" in params).apply({"params": params}, batch["tokens"]), batch)


@functools.cache
def initial(conv: bool = True) -> Any:
    """The parameters that :func:`linen` starts from, as host arrays."""
    return jax.device_get(params_of(conv))


@functools.cache
def gradient_by_row(conv: bool) -> Any:
    """The loss and the gradient of each row alone, [rows, ...], on one device."""
    rows = {name: x[:, None] for name, x in batch().items()}
    per_row = jax.vmap(jax.value_and_grad(loss), (None, 0))
    return jax.device_get(jax.jit(per_row)(initial(conv), rows))


def linen(tx: Any, conv: bool = True) -> tuple[Callable[[], TrainState], Callable[..., Any]]:
    """``create`` and a step; what is updated with SGD at rate 1 tells the gradient."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, grads = zerojax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    return lambda: TrainState.create(apply_fn=None, params=params_of(conv), tx=tx), step


def losses_of(step: Any, state: TrainState, seeds: Sequence[int], rows: Any = slice(None)) -> Any:
    """A step's losses for one batch after another."""
    losses = []
    for seed in seeds:
        state, value = step(state, {name: x[rows] for name, x in batch(seed).items()})
        losses.append(float(np.mean(value)))
    return losses


@functools.cache
def plain_losses(seeds: Sequence[int]) -> list[float]:
    """Those of plain jit on one device."""
    create, step = linen(optax.adam(3e-3))
    return losses_of(jax.jit(step), create(), seeds)


def zero_of(stage: int, k: int = 1, **keywords: Any) -> zerojax.Zero:
    keywords = {"stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(stage=stage, gradient_accumulation_steps=k, **keywords)


def gradient_of(stage: int, k: int, conv: bool = True, **keywords: Any) -> Any:
    """The gradient of a step, by the change of the parameters; the loss; the plan."""
    zero, (create, step) = zero_of(stage, k, **keywords), linen(optax.sgd(1.0), conv)
    state = create()
    plan = zero.plan(state)
    after, value = zero(step)(state, batch())
    change = jax.tree.map(lambda old, new: old - np.asarray(new), initial(conv), after.params)
    return change, np.mean(value), plan


def sent_by_devices(parts: np.ndarray, spec: P, how: Quantization = INT8) -> np.ndarray:
    """The sum of the devices' parts [devices, *shape] as it arrives in one exchange."""
    at = [d for d, entry in enumerate(spec) if entry]
    if len(at) != 1:
        return parts.sum(0)
    moved = jnp.moveaxis(jnp.asarray(parts), 1 + at[0], 1)
    block = block_of_slice(moved.shape[1:], DEVICES, how)
    if block is None:
        return parts.sum(0)
    pieces = moved.reshape(DEVICES, DEVICES, -1, *moved.shape[2:])
    codes, scales = quantize(pieces, (1, 1, *block), how.format)
    total = dequantize(codes, scales, how.format, jnp.float32).sum(0)
    return np.asarray(jnp.moveaxis(total.reshape(moved.shape[1:]), 0, at[0]))


def parts(k: int, conv: bool, *, once: bool) -> Any:
    """What the devices exchange, [exchanges, devices, *shape]: ``once`` an update, or once a
    micro-batch."""

    def of_devices(by_row: np.ndarray) -> np.ndarray:
        each = by_row.reshape(k, DEVICES, -1, *by_row.shape[1:]).sum(2) / ROWS
        return each.sum(0, keepdims=True) if once else each

    return jax.tree.map(of_devices, gradient_by_row(conv)[1])


def assert_near(got: Any, parts: Any, specs: Any, how: Quantization) -> None:
    """Equal to the sum of the parts as they arrive, but for what is rounded to the next code for a
    bit in its last place."""

    def check(one: np.ndarray, each: np.ndarray, spec: P) -> None:
        other = sum(sent_by_devices(x, spec, how) for x in each)
        rounding = 1e-5 * np.abs(other).max() + 3e-7  # a parameter's own last place
        code = np.abs(each).max() / LARGEST[how.format]
        assert (np.abs(one - other) > rounding).mean() < 2e-3
        np.testing.assert_allclose(one, other, atol=rounding + code)

    jax.tree.map(check, got, parts, specs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "k", "form", "conv"),
    [
        (1, 4, "int8", False),  # on lanes
        (3, 4, "int8", False),
        pytest.param(1, 4, "int4", True, marks=SLOW),
        pytest.param(2, 4, "int8", True, marks=SLOW),
        pytest.param(3, 1, "int4", True, marks=SLOW),
    ],
)
def test_gradients_are_sums_of_quantized_parts(stage: int, k: int, form: Any, conv: bool) -> None:
    keywords = {"zero_quantized_gradients": True, "zero_quantized_gradients_dtype": form}
    got, value, plan = gradient_of(stage, k, conv, **keywords)
    losses, by_row = gradient_by_row(conv)
    np.testing.assert_allclose(value, losses.mean(), rtol=1e-6)
    once = stage == 1 and not conv  # convolutions do not run on lanes
    assert_near(got, parts(k, conv, once=once), plan.params, Quantization(form))
    for name in {"first", "second", "conv"} & got.keys():  # and those differ from exact ones
        exact = jax.tree.map(lambda g: g.mean(0), by_row[name])
        apart = np.abs(got[name]["kernel"] - exact["kernel"]).max()
        assert apart > 1e-4 * np.abs(exact["kernel"]).max()
        np.testing.assert_array_equal(got[name]["bias"].shape, exact["bias"].shape)


@functools.cache
def value_and_gradient() -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "k", "form"),
    [
        (3, 1, "int8"),
        (1, 4, "float8_e4m3fn"),
        pytest.param(2, 4, "int8", marks=SLOW),
    ],
)
def test_parameters_are_gathered_quantized(stage: int, k: int, form: Any) -> None:
    """The gradient at the parameters as they arrive; straight through."""
    keywords = {"zero_quantized_weights": True, "zero_quantized_weights_dtype": form}
    got, value, plan = gradient_of(stage, k, **keywords)
    how = Quantization(form)
    assert {leaf.path for leaf in plan.quantized.leaves} == {
        f"params['{name}']['kernel']" for name in ("conv", "first", "second")
    }

    def arrived(path: Any, x: jax.Array, spec: P) -> jax.Array:
        if "params" + jax.tree_util.keystr(path) not in plan.quantized.paths:
            return x
        full = (*spec, *(None,) * (x.ndim - len(spec)))
        block = block_of(x.shape, full, plan.mesh, "data", how)
        assert block is not None
        return dequantize(*quantize(x, block, form), form, x.dtype)

    params = jax.tree_util.tree_map_with_path(arrived, initial(), plan.params)
    want_value, want = value_and_gradient()(params, batch())
    np.testing.assert_allclose(value, want_value, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)
    assert abs(value - value_and_gradient()(initial(), batch())[0]) > 1e-7


@pytest.mark.parametrize(
    ("bad_number", "stage"),
    [(np.inf, 3), pytest.param(np.nan, 1, marks=SLOW), pytest.param(1e30, 2, marks=SLOW)],
)
def test_a_poisoned_shard_skips_the_step(stage: int, bad_number: float) -> None:
    """One row of one device makes gradients that are not finite: nothing changes, as without."""
    zero, (create, step) = zero_of(stage, check_finite=True, **BOTH), linen(optax.adam(1e-2))
    state, bad = zero.init(create), batch()
    bad["y"][5] = bad_number
    before, one = jax.device_get(state.params), zero(step)
    state, _ = one(state, bad)
    assert zerojax.telemetry(state)["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    state, value = one(state, batch())
    assert np.isfinite(value)
    assert zerojax.telemetry(state)["skipped_steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "keywords"),
    [
        ({"replica": 2, "data": 4}, {"bf16": True}),
        ({"data": 4, "model": 2}, {"fp16": True, "initial_scale_power": 8}),
        ({"data": 8}, {"zero_hpz_partition_size": 4}),
        ({"data": 8}, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    ],
    ids=str,
)
def test_beside_others(axes: dict[str, int], keywords: dict[str, Any]) -> None:
    """Trains as it does without: the same falling losses, one percent apart at most."""
    runs = []
    rounded = bool({"bf16", "fp16"} & keywords.keys())  # beside its own; others have plain jit's
    for more in ({}, BOTH) if rounded else (BOTH,):
        zero = zero_of(3, mesh=zerojax.mesh(axes=axes), **keywords, **more)
        create, step = linen(optax.adam(3e-3))
        runs.append(losses_of(zero(step), zero.init(create), (0,) * 6))
    want, got = runs if rounded else (plain_losses((0,) * 6), *runs)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) > APART
    assert got[-1] < 0.9 * got[0]
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01)


SEEDS = (0, 1, 2, 3)


def process_losses(process: int) -> list[float]:
    """Four steps, each with the process's own rows."""
    zero, (create, step) = zero_of(3, **BOTH), linen(optax.adam(3e-3))
    return losses_of(zero(step), zero.init(create), SEEDS, zerojax.process_rows(ROWS))


def test_two_processes(in_processes: Callable[..., list[Any]], quick_processes: None) -> None:
    """Gradients are added up inside a process first; both see the same losses."""
    one, other = in_processes(2, process_losses)
    assert one == other
    single = process_losses(0)
    assert one != single  # which quantizes once, not twice
    np.testing.assert_allclose(one, plain_losses(SEEDS), rtol=0.02)
    np.testing.assert_allclose(one, single, rtol=0.02)


def test_what_goes_the_plain_way_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A weight that a loop uses many times is summed up in the loop, and reduced once."""

    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def value(params: Any) -> jax.Array:
            carry, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["w"]), None), x, length=4)
            return jnp.mean(carry**2)

        out, grads = jax.value_and_grad(value)(state.params)
        return state.apply_gradients(grads=grads), out

    def create() -> TrainState:
        params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 8}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    zero = zero_of(2, zero_quantized_gradients=True)
    state, _ = zero(step)(zero.init(create), x)
    want, _ = jax.jit(step)(create(), x)
    np.testing.assert_allclose(state.params["w"], want.params["w"], atol=1e-6)
    assert "zero_quantized_gradients" in caplog.text
    assert f"['w'] ({WIDTH}, {WIDTH})" in caplog.text


def test_the_plan_says_what_is_quantized() -> None:
    zero, (create, _) = zero_of(3, zero_quantized_weights=True), linen(optax.adam(1e-2))
    table = str(zero.plan(zero.init(create)))
    assert "zero_quantized_weights: 3 parameters" in table
    assert "are gathered as int8" in table
    assert "['Embed_0']['embedding']" in table


@pytest.mark.slow
def test_frozen_parameters_alone() -> None:
    """zero_quantized_nontrainable_weights: those that the optimizer does not update."""
    rules = {"moves": optax.adam(1e-2), "still": optax.set_to_zero()}
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "still" if "first" in jax.tree_util.keystr(path) else "moves", initial()
    )
    zero = zero_of(3, zero_quantized_nontrainable_weights=True)
    create, step = linen(optax.partition(rules, labels))
    state = zero.init(create)
    assert zero.plan(state).quantized.paths == {"params['first']['kernel']"}
    before = jax.device_get(state.params)
    state, _ = zero(step)(state, batch())
    np.testing.assert_array_equal(before["first"]["kernel"], state.params["first"]["kernel"])
    assert np.abs(before["second"]["kernel"] - state.params["second"]["kernel"]).max() > 0


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_block_size_that_does_not_divide(size: int) -> None:
    zero = zero_of(3, zero_quantized_weights=True, zero_quantized_block_size=size)
    create, _ = linen(optax.adam(1e-2))
    with pytest.raises(zerojax.ConfigError, match=r"zero_quantized_block_size.*into blocks: write"):
        zero.init(create)


def test_float8_needs_a_device_that_has_it() -> None:
    mesh = zerojax.topology("a100", devices=8)
    keywords = {"zero_quantized_weights": True, "zero_quantized_weights_dtype": "float8_e4m3fn"}
    create, _ = linen(optax.adam(1e-2))
    with pytest.raises(zerojax.ConfigError, match=r"capability 8\.9.*int8"):
        zero_of(3, mesh=mesh, **keywords).plan(jax.eval_shape(create))


def test_the_gradient_of_a_table_keeps_what_its_rows_are_added_to() -> None:
    """A penalty of the whole table, from a lookup's own backward pass."""

    @jax.custom_vjp
    def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    def backward(tokens: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
        return jnp.full((96, WIDTH), 5.0).at[tokens].add(g), None

    lookup.defvjp(lambda table, tokens: (table[tokens], tokens), backward)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0, **BOTH)
    table = np.random.default_rng(0).normal(size=(96, WIDTH)).astype(np.float32)

    @zero
    def step(state: TrainState, batch: Any) -> TrainState:
        def loss(params: Any) -> jax.Array:
            return loss_of(lookup(params["table"], batch["tokens"]).mean((1, 2)), batch)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def create() -> TrainState:
        params = {"table": jnp.asarray(table)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

    after = step(zero.init(create), batch()).params["table"]
    np.testing.assert_allclose(table - after, 5.0, atol=0.05)
