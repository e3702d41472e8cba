"""ZeRO++'s quantized collectives: the numbers of the same arithmetic on one device."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.plan.quantized import Quantization, block_of, block_of_slice

pytestmark = pytest.mark.usefixtures("quick_compile")

DEVICES, ROWS, WIDTH = 8, 32, 128
INT8 = Quantization("int8")
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep


class Model(nn.Module):
    """Tokens [rows, 64] to [rows]: a table, perhaps a convolution, two dense layers."""

    conv: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(96, WIDTH)(tokens)
        x = nn.tanh(nn.Conv(WIDTH, (3,), name="conv")(x)) if self.conv else x
        x = nn.tanh(nn.Dense(2 * WIDTH, name="first")(x))
        return nn.Dense(WIDTH, name="second")(x).mean((1, 2))


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(96, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.first = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.second = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nnx.tanh(self.conv(self.table(tokens)))
        return self.second(nnx.tanh(self.first(x))).mean((1, 2))


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.normal(size=ROWS).astype(np.float32)
    return {"tokens": rng.integers(0, 96, (ROWS, 64)).astype(np.int32), "y": y}


def loss_of(predicted: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((predicted - batch["y"]) ** 2)


def params_of(conv: bool = True) -> Any:
    return Model(conv).init(jax.random.key(0), jnp.zeros((1, 64), jnp.int32))["params"]


def loss(params: Any, batch: Any) -> jax.Array:
    return loss_of(Model("conv" in params).apply({"params": params}, batch["tokens"]), batch)


def linen(tx: Any, conv: bool = True) -> tuple[Callable[[], TrainState], Callable[..., Any]]:
    """``create`` and a step; what is updated with SGD at rate 1 tells the gradient."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, grads = zerojax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    return lambda: TrainState.create(apply_fn=None, params=params_of(conv), tx=tx), step


def zero_of(stage: int, k: int = 1, **keywords: Any) -> zerojax.Zero:
    keywords = {"stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(stage=stage, gradient_accumulation_steps=k, **keywords)


@functools.cache
def gradient_of(
    stage: int, k: int, keywords: tuple[tuple[str, Any], ...], conv: bool = True
) -> Any:
    """What a step makes, by the change of the parameters."""
    zero, (create, step) = zero_of(stage, k, **dict(keywords)), linen(optax.sgd(1.0), conv)
    state = zero.init(create)
    before = jax.device_get(state.params)
    after, value = zero(step)(state, batch())
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, after.params)
    return change, np.mean(value), zero.plan(state)


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


def expected(k: int, specs: Any, how: Quantization, conv: bool, *, once: bool) -> Any:
    """The gradient of one device after another, quantized and added up; ``once`` an update, or once
    a micro-batch."""
    rows = {name: x.reshape(k, DEVICES, -1, *x.shape[1:]) for name, x in batch().items()}
    grad = jax.jit(jax.vmap(jax.vmap(jax.grad(loss), (None, 0)), (None, 0)))(params_of(conv), rows)
    parts = jax.tree.map(lambda g: np.asarray(g) / (k * DEVICES), grad)
    if once:
        parts = jax.tree.map(lambda g: g.sum(0, keepdims=True), parts)
    return jax.tree.map(
        lambda g, spec: sum(sent_by_devices(each, spec, how) for each in g), parts, specs
    )


def assert_near(got: Any, want: Any) -> None:
    """Equal, but for what is rounded to another code for a bit in its last place."""
    for path, one in jax.tree_util.tree_leaves_with_path(got):
        other = dict(jax.tree_util.tree_leaves_with_path(want))[path]
        scale = np.abs(other).max()
        apart = np.abs(one - other) > 1e-5 * scale + 3e-7  # a parameter's own last place
        assert apart.mean() < 2e-3, path
        np.testing.assert_allclose(one, other, atol=0.02 * scale)


@pytest.mark.parametrize(
    ("stage", "k", "form", "conv"),
    [
        *(pytest.param(s, k, "int8", True, marks=SLOW) for s, k in ((1, 4), (2, 4), (3, 1))),
        *(pytest.param(s, k, "int8", True, marks=SWEEP) for s, k in ((1, 1), (2, 1), (3, 4))),
        (1, 4, "int8", False),  # on lanes
        (3, 4, "int8", False),
        pytest.param(1, 4, "int4", False, marks=SLOW),
        pytest.param(3, 1, "int4", True, marks=SLOW),
    ],
)
def test_gradients_are_sums_of_quantized_parts(stage: int, k: int, form: Any, conv: bool) -> None:
    keywords = {"zero_quantized_gradients": True, "zero_quantized_gradients_dtype": form}
    got, value, plan = gradient_of(stage, k, tuple(keywords.items()), conv)
    exact, want, _ = gradient_of(stage, k, (), conv)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    once = stage == 1 and not conv  # convolutions do not run on lanes
    assert_near(got, expected(k, plan.params, Quantization(form), conv, once=once))
    for name in {"first", "second", "conv"} & got.keys():  # and those differ from exact ones
        assert np.abs(got[name]["kernel"] - exact[name]["kernel"]).max() > 0
        np.testing.assert_array_equal(got[name]["bias"].shape, exact[name]["bias"].shape)


@pytest.mark.parametrize(
    ("stage", "k", "form"),
    [
        (3, 1, "int8"),
        (1, 4, "float8_e4m3fn"),
        *(pytest.param(s, k, "int8", marks=SLOW) for s, k in ((2, 4), (3, 4))),
        *(pytest.param(1, k, "int8", marks=SWEEP) for k in (1, 4)),
        pytest.param(3, 1, "float8_e4m3fn", marks=SWEEP),
    ],
)
def test_parameters_are_gathered_quantized(stage: int, k: int, form: Any) -> None:
    """The gradient at the parameters as they arrive; straight through."""
    keywords = {"zero_quantized_weights": True, "zero_quantized_weights_dtype": form}
    got, value, plan = gradient_of(stage, k, tuple(keywords.items()))
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

    params = jax.tree_util.tree_map_with_path(arrived, params_of(), plan.params)
    want_value, want = jax.jit(jax.value_and_grad(loss))(params, batch())
    np.testing.assert_allclose(value, want_value, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)
    assert abs(value - loss(params_of(), batch())) > 1e-7


def nnx_run(stage: int, k: int, **keywords: Any) -> tuple[np.ndarray, Any]:
    zero = zero_of(stage, k, **keywords)

    def step(model: Nnx, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: loss_of(m(batch["tokens"]), batch))(model)
        optimizer.update(model, grads)
        return value

    def create() -> tuple[Nnx, nnx.Optimizer]:
        model = Nnx(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = zero.init(create)
    one = zero(step)
    values = [np.mean(one(model, optimizer, batch(i))) for i in range(4)]
    return np.array(values), jax.device_get(nnx.state(model, nnx.Param))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "k"), [pytest.param(1, 4, marks=SWEEP), (3, 1), (2, 4)])
def test_nnx(stage: int, k: int) -> None:
    both = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    values, _ = nnx_run(stage, k, **both)
    want, _ = nnx_run(stage, k)
    assert not np.array_equal(values, want)
    np.testing.assert_allclose(values, want, rtol=0.02)


BAD = {"nan": np.nan, "inf": np.inf, "1e30": 1e30}
POISONED = {("nan", 1), ("1e30", 2)}
"""Those that are slow beside ("inf", 3), which is fast: each number and each stage once."""


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("inf", 3),
        *(
            pytest.param(*(name, stage), marks=SLOW if (name, stage) in POISONED else SWEEP)
            for name in BAD
            for stage in (1, 2, 3)
            if (name, stage) != ("inf", 3)
        ),
    ],
)
def test_a_poisoned_shard_skips_the_step(stage: int, name: str) -> None:
    """One row of one device makes gradients that are not finite: nothing changes, as without."""
    keywords = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    zero, (create, step) = zero_of(stage, check_finite=True, **keywords), linen(optax.adam(1e-2))
    state, bad = zero.init(create), batch()
    bad["y"][5] = BAD[name]
    before, one = jax.device_get(state.params), zero(step)
    state, _ = one(state, bad)
    assert zerojax.telemetry(state)["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    state, value = one(state, batch())
    assert np.isfinite(value)
    assert zerojax.telemetry(state)["skipped_steps"] == 1


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SWEEP), 3])
def test_a_shard_of_zeros_and_an_outlier(stage: int) -> None:
    """Large but finite: the other blocks keep their precision."""
    zero, (create, step) = zero_of(stage, zero_quantized_gradients=True), linen(optax.sgd(1e-9))
    rows = batch()
    rows["y"][:4] = np.asarray(Model().apply({"params": params_of()}, rows["tokens"][:4]))
    rows["y"][9] = 1e9
    state, value = zero(step)(zero.init(create), rows)
    want, want_value = jax.jit(step)(create(), rows)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    for one, other, old in zip(
        *map(jax.tree.leaves, (state.params, want.params, params_of())), strict=True
    ):
        change = np.abs(np.asarray(other) - np.asarray(old)).max()
        np.testing.assert_allclose(one, other, atol=0.02 * change + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "keywords"),
    [
        ({"replica": 2, "data": 4}, {}),
        ({"data": 8}, {"zero_hpz_partition_size": 4}),
        ({"data": 4, "model": 2}, {}),
        ({"data": 8}, {"bf16": True}),
        ({"data": 8}, {"fp16": True, "initial_scale_power": 8}),
        pytest.param({"data": 8}, {"offload_optimizer": "cpu"}, marks=SWEEP),
        ({"data": 8}, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    ],
    ids=str,
)
def test_beside_others(axes: dict[str, int], keywords: dict[str, Any]) -> None:
    """Trains as it does without: the same falling losses, one percent apart at most."""
    losses = []
    for more in ({}, {"zero_quantized_weights": True, "zero_quantized_gradients": True}):
        zero = zero_of(3, mesh=zerojax.mesh(axes=axes), **keywords, **more)
        create, step = linen(optax.adam(3e-3))
        state, one = zero.init(create), zero(step)
        losses.append([float(np.mean((out := one(state, batch()), state := out[0])[0][1]))
                       for _ in range(6)])  # fmt: skip
    assert losses[1] != losses[0]
    assert losses[1][-1] < 0.9 * losses[1][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_a_restart_goes_on_bit_for_bit(tmp_path: Path) -> None:
    both = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    zero, (create, step) = zero_of(3, **both), linen(optax.adam(3e-3))
    one, state = zero(step), zero.init(create)
    state, _ = one(state, batch(0))
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
    with Checkpointer(tmp_path, zero) as checkpointer:
        again = checkpointer.restore(zero.abstract_state(create))
    for i in (1, 2):
        state, value = one(state, batch(i))
        again, other = one(again, batch(i))
        assert value == other
    for x, y in zip(*map(jax.tree.leaves, (state.params, again.params)), strict=True):
        np.testing.assert_array_equal(x, y)


def losses_of(process: int, keywords: dict[str, Any]) -> list[float]:
    """Four steps, each with the process's own rows."""
    zero, (create, step) = zero_of(3, **keywords), linen(optax.adam(3e-3))
    state, one, own = zero.init(create), zero(step), zerojax.process_rows(ROWS)
    losses = []
    for i in range(4):
        state, value = one(state, {name: x[own] for name, x in batch(i).items()})
        losses.append(float(value))
    return losses


def test_two_processes(in_processes: Callable[..., list[Any]], quick_processes: None) -> None:
    """Gradients are added up inside a process first; both see the same losses."""
    both = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    one, other = in_processes(2, losses_of, both)
    assert one == other
    plain, single = losses_of(0, {}), losses_of(0, both)
    assert one != single  # which quantizes once, not twice
    np.testing.assert_allclose(one, plain, rtol=0.02)
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
    assert f"({WIDTH}, {WIDTH})" in caplog.text


def test_the_plan_says_what_is_quantized() -> None:
    zero, (create, _) = zero_of(3, zero_quantized_weights=True), linen(optax.adam(1e-2))
    table = str(zero.plan(zero.init(create)))
    assert "zero_quantized_weights: 3 parameters" in table
    assert "are gathered as int8" in table
    assert "['Embed_0']['embedding']" in table


def test_frozen_parameters_alone() -> None:
    """zero_quantized_nontrainable_weights: those that the optimizer does not update."""
    rules = {"moves": optax.adam(1e-2), "still": optax.set_to_zero()}
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "still" if "first" in jax.tree_util.keystr(path) else "moves", params_of()
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
    with pytest.raises(zerojax.ConfigError, match=r"zero_quantized_block_size.*set a size of"):
        zero.init(create)


def test_float8_needs_a_device_that_has_it() -> None:
    mesh = zerojax.topology("a100", devices=8)
    keywords = {"zero_quantized_weights": True, "zero_quantized_weights_dtype": "float8_e4m3fn"}
    create, _ = linen(optax.adam(1e-2))
    with pytest.raises(zerojax.ConfigError, match=r"capability 8\.9.*int8"):
        zero_of(3, mesh=mesh, **keywords).plan(jax.eval_shape(create))
