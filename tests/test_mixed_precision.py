"""fp16 and bf16 steps: what is scaled, skipped, held, refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import zerojax
from zerojax.monitor.after_step import LossScaleError

pytestmark = pytest.mark.usefixtures("quick_compile")

Batch = dict[str, np.ndarray]


class State(TrainState):
    """Carries what a step may change beside the parameters."""

    mean: Any
    key: Any


def create(key: jax.Array) -> State:
    """A two-layer network on [rows, 16] inputs."""
    a, b = jax.random.split(key)
    params = {
        "first": jax.random.normal(a, (16, 32)) / 4,
        "bias": jnp.zeros(32),
        "second": jax.random.normal(b, (32, 8)) / 6,
    }
    tx = optax.adamw(1e-2)
    mean, carried = jnp.zeros(16), jax.random.key(1)
    return State.create(apply_fn=None, params=params, tx=tx, mean=mean, key=carried)


def network(params: Any, x: jax.Array) -> jax.Array:
    x = x.astype(params["first"].dtype)
    return jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"]


def step_with(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: State, batch: Any) -> Any:
        key, noise = jax.random.split(state.key)
        x = batch["x"] + 0.01 * jax.random.normal(noise, batch["x"].shape)

        def loss(params: Any) -> jax.Array:
            return jnp.mean((network(params, x).astype(jnp.float32) - batch["y"]) ** 2)

        value, grads = value_and_grad(loss)(state.params)
        new = state.apply_gradients(grads=grads)
        return new.replace(mean=0.9 * state.mean + 0.1 * batch["x"].mean(0), key=key), value

    return step


step = step_with(zerojax.value_and_grad)


def batches(n: int, rows: int = 32) -> list[Batch]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(rows, 16)).astype(np.float32),
            "y": rng.normal(size=(rows, 8)).astype(np.float32),
        }
        for _ in range(n)
    ]


def run(zero: zerojax.Zero, batches: list[Batch], body: Any = step) -> tuple[Any, list[float]]:
    state, losses = zero.init(create, jax.random.key(0)), []
    decorated = zero(body)
    for batch in batches:
        state, loss = decorated(state, batch)
        losses.append(float(loss))
    return state, losses


def spoilt(batch: Batch, bad: float, row: int = 13) -> Batch:
    x = batch["x"].copy()
    x[row, 5] = bad
    return batch | {"x": x}


def bits(tree: Any) -> list[bytes]:
    def data(x: Any) -> bytes:
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if key else x).tobytes()

    return [data(x) for x in jax.tree.leaves(tree)]


FP16, BF16 = {"fp16": True, "loss_scale": 1024.0}, {"bf16": True, "check_grad_overflow": True}
SLOW = [(1, 1, FP16), (0, 2, BF16)]


@pytest.mark.parametrize(
    ("stage", "accumulation", "keywords"),
    [(3, 2, FP16), (3, 1, BF16), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)],
)
def test_overflowed_batches_leave_no_trace(
    stage: int, keywords: dict[str, Any], accumulation: int
) -> None:
    """The same parameters, moments, statistics and keys, bit by bit, as a run without them."""
    zero = zero_for(stage, **keywords, k=accumulation)
    good = batches(6)
    seen = list(good)
    for at, bad in ((5, np.nan), (3, -np.inf), (3, np.inf), (0, np.inf)):
        seen.insert(at, spoilt(good[0], bad))
    clean, _ = run(zero, good)
    state, _ = run(zero, seen)
    assert bits(state.params) == bits(clean.params)
    assert bits(state.opt_state) == bits(clean.opt_state)
    assert bits((state.mean, state.key)) == bits((clean.mean, clean.key))
    told = zerojax.telemetry(state)
    assert (int(told["skipped_steps"]), int(told["step"]), int(state.step)) == (4, 10, 10)
    assert float(told["loss_scale"]) == keywords.get("loss_scale", 1.0)  # a static one stays


def test_a_skipped_step_changes_no_parameter_by_itself() -> None:
    def shifting(state: State, batch: Any) -> Any:
        new, value = step(state, batch)
        return new.replace(params=new.params | {"bias": new.params["bias"] + 1}), value

    good = batches(2)
    zero = zero_for(3, **FP16)
    clean, _ = run(zero, good, shifting)
    state, _ = run(zero, [good[0], spoilt(good[0], np.inf), good[1]], shifting)
    assert np.min(clean.params["bias"]) > 1
    assert bits(state.params) == bits(clean.params)


def test_without_the_check_bf16_applies_what_comes() -> None:
    state, _ = run(zero_for(2, bf16=True), [spoilt(batches(1)[0], np.nan)])
    assert np.isnan(state.params["first"]).any()


@pytest.mark.parametrize("transform", [jax.value_and_grad, "grad", "dynamic scale"])
def test_gradients_without_the_scale_are_refused(transform: Any) -> None:
    if transform == "grad":

        def transform(loss: Any) -> Any:
            return lambda params: (loss(params), jax.grad(loss)(params))

    elif transform == "dynamic scale":

        def transform(loss: Any) -> Any:
            return lambda params: DynamicScale().value_and_grad(loss)(params)[2:]

    zero = zero_for(3, fp16=True)
    state = zero.init(create, jax.random.key(0))
    with pytest.raises(ValueError, match=r"3 of 3 gradients .* zerojax.value_and_grad"):
        zero(step_with(transform))(state, batches(1)[0])


def test_the_scale_reaches_gradients_taken_within_jit_scan_and_cond() -> None:
    """A gradient smaller than fp16 can hold, so that it is zero without the scale."""
    tiny = np.full((8, 16), 1e-9, np.float32)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((w * 1).astype(jnp.float32) * x)

    def plain(w: jax.Array, x: jax.Array) -> Any:
        return zerojax.grad(loss)(w, x)

    def scanned(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, row: (c + plain(w, row), None), 0 * w, x)[0] / len(x)

    def looped(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.fori_loop(0, x.shape[0], lambda i, c: c + plain(w, x[i]), 0 * w) / len(x)

    def branched(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.cond(x[0, 0] > 0, plain, lambda w, x: 0 * w, w, x)

    for take in (plain, jax.jit(plain), scanned, looped, branched, jax.checkpoint(plain)):

        def body(state: Any, x: jax.Array, take: Any = take) -> Any:
            return state.apply_gradients(grads={"w": take(state.params["w"], x)}), 0.0

        params = {"w": jnp.zeros(16)}
        state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
        state, _ = zero_for(3, fp16=True)(body)(state, tiny)
        np.testing.assert_allclose(state.params["w"], -1e-9 / 16, rtol=1e-2)


def test_nnx() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.second = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nnx.relu(self.norm(self.first(x))))

    def body(model: Net, optimizer: nnx.Optimizer, batch: Any) -> Any:
        def loss(model: Net) -> jax.Array:
            return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

        value, grads = zerojax.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    good = batches(4)
    ends = []
    for some in (good, [*good[:2], spoilt(good[0], np.nan), *good[2:]]):
        zero = zero_for(3, fp16=True, loss_scale=256.0)
        model, optimizer = zero.init(make)
        decorated = zero(body)
        losses = [float(decorated(model, optimizer, batch)) for batch in some]
        assert losses[-1] < losses[0]
        ends.append(bits(nnx.as_pure(nnx.state(model))))
        assert int(zerojax.telemetry(optimizer)["skipped_steps"]) == len(some) - 4
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_an_overflow_at_the_smallest_scale_raises() -> None:
    knobs = dict(fp16=True, initial_scale_power=3, hysteresis=1, min_loss_scale=4.0)
    bad = spoilt(batches(1)[0], np.nan)
    zero = zero_for(2, **knobs)
    state = zero.init(create, jax.random.key(0))
    decorated = zero(step)
    for _ in range(3):  # to 4, overflow there, and one more before that is read
        state, _ = decorated(state, bad)
    with pytest.raises(LossScaleError, match=r"minimum loss scale, 4.*raise_error_at_min_scale"):
        decorated(state, bad)
    assert np.isfinite(state.params["first"]).all()  # not donated: it can be saved
    state, _ = decorated(state, batches(1)[0])
    state, _ = run(zero_for(2, **knobs, raise_error_at_min_scale=False), [bad] * 10)
    assert int(zerojax.telemetry(state)["skipped_steps"]) == 10


def test_two_updates_cannot_share_a_scale() -> None:
    def twice(state: State, batch: Any) -> Any:
        return step(step(state, batch)[0], batch)

    with pytest.raises(ValueError, match=r"2 times at .*, which fp16 does not"):
        run(zero_for(2, fp16=True), batches(1), twice)


def test_a_state_without_loss_scale_is_refused() -> None:
    zero = zero_for(2, optimizer={"type": "AdamW"})
    state = create(jax.random.key(0)).replace(tx=zero.optimizer())
    state = state.replace(opt_state=state.tx.init(state.params))
    with pytest.raises(ValueError, match=r"fp16 is on.*no loss scale"):
        zero_for(2, fp16=True)(step)(state, batches(1)[0])


@pytest.mark.parametrize("auto_cast", [False, True])
def test_auto_cast_casts_the_batch(auto_cast: bool) -> None:
    seen = set()

    def body(state: State, batch: Any) -> Any:
        seen.update(str(x.dtype) for x in jax.tree.leaves(batch))
        return step(state, batch)

    run(zero_for(1, fp16=True, auto_cast=auto_cast), [batches(1)[0] | {"n": np.arange(32)}], body)
    assert seen == {"float16" if auto_cast else "float32", "int32"}


@pytest.mark.parametrize(
    ("process", "allowed"),
    [
        (lambda g, p: jnp.where(jnp.isnan(g), 0, g + g), True),
        (lambda g, p: g * jnp.minimum(1, 1 / jnp.linalg.norm(g)), False),
        (lambda g, p: g + 0.1 * p, False),
    ],
)
def test_what_is_done_to_scaled_gradients_must_be_proportional(process: Any, allowed: bool) -> None:
    def body(state: State, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((network(params, batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

        value, grads = zerojax.value_and_grad(loss)(state.params)
        grads = jax.tree.map(process, grads, state.params)
        return state.apply_gradients(grads=grads), value

    if allowed:
        state, _ = run(zero_for(2, fp16=True), batches(1), body)
        plain, _ = run(zero_for(2), batches(1), body)
        both = map(jax.tree.leaves, (state.opt_state, plain.opt_state))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3 * float(jnp.max(jnp.abs(b))))
    else:
        with pytest.raises(ValueError, match=r"clipped or added to .* optax chain"):
            run(zero_for(2, fp16=True), batches(1), body)


def test_a_gradient_within_the_loss_is_taken_with_jax() -> None:
    def penalised(inner: Any) -> Any:
        def body(state: State, batch: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                def energy(x: jax.Array) -> jax.Array:
                    return jnp.sum(network(params, x).astype(jnp.float32) ** 2)

                return jnp.mean(inner(energy)(batch["x"]) ** 2)

            value, grads = zerojax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        return body

    _, scaled = run(zero_for(1, fp16=True, loss_scale=8.0), batches(1), penalised(jax.grad))
    _, plain = run(zero_for(1), batches(1), penalised(jax.grad))
    np.testing.assert_allclose(scaled, plain, rtol=2e-2)
    with pytest.raises(ValueError, match="take the inner one with jax"):
        run(zero_for(1, fp16=True), batches(1), penalised(zerojax.grad))


@pytest.mark.slow
def test_an_update_in_a_branch_and_in_a_loop() -> None:
    def chosen(value_and_grad: Any) -> Any:
        def body(state: State, batch: Any) -> Any:
            update = step_with(value_and_grad)
            return jax.lax.cond(
                state.step % 2 == 0,
                lambda s: update(s, batch),
                lambda s: (s, jnp.float32(0)),
                state,
            )

        return body

    def looped(state: State, batch: Any) -> Any:
        return jax.lax.scan(lambda s, _: step(s, batch), state, length=2)

    state, _ = run(zero_for(3, fp16=True), batches(2), chosen(zerojax.value_and_grad))
    plain, _ = run(zero_for(3), batches(2), chosen(zerojax.value_and_grad))
    got, want = (optax.tree.get(s.opt_state, "mu")["first"] for s in (state, plain))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3 * float(jnp.max(jnp.abs(want))))
    with pytest.raises(ValueError, match=r"3 of 3 gradients"):
        run(zero_for(3, fp16=True), batches(1), chosen(jax.value_and_grad))
    with pytest.raises(ValueError, match=r"in a loop at .*py:\d+, which fp16 does not"):
        run(zero_for(3, fp16=True), batches(1), looped)
    with pytest.raises(
        ValueError,
        match=r"in a loop at .*py:\d+, which accumulation over",
    ):
        run(zero_for(3, k=2), batches(1), looped)


def test_moments_in_a_dtype_of_their_own() -> None:
    def low(key: jax.Array) -> State:
        made = create(key)
        tx = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
        return made.replace(tx=tx, opt_state=tx.init(made.params))

    zero = zero_for(2, fp16=True)
    state = zero.init(low, jax.random.key(0))
    before = jax.tree.map(lambda x: x.dtype, state.opt_state)
    decorated = zero(step)
    state, _ = decorated(state, batches(1)[0])
    assert jax.tree.map(lambda x: x.dtype, state.opt_state) == before
    assert optax.tree.get(state.opt_state, "mu")["first"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("placed", "devices"), [("init", 8), ("plain", 1)])
def test_a_model_in_bf16_with_the_configs_own_optimizer(placed: str, devices: int) -> None:
    """Masters and moments are float32 all the same, and the caller's arrays live on."""
    zero = zero_for(3, fp16=True, optimizer={"type": "AdamW"}, mesh=zerojax.mesh(devices))

    def low(key: jax.Array) -> State:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), create(key).params)
        return State.create(
            apply_fn=None, params=params, tx=zero.optimizer(), mean=jnp.zeros(16),
            key=jax.random.key(1),
        )  # fmt: skip

    made = low(jax.random.key(0))
    state = zero.init(low, jax.random.key(0)) if placed == "init" else made
    state, _ = zero(step)(state, batches(1)[0])
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    assert optax.tree.get(state.opt_state, "mu")["first"].dtype == jnp.float32
    assert np.isfinite(made.params["first"].astype(jnp.float32)).all()


def test_wrapped_once_and_for_this_precision() -> None:
    zero = zero_for(1, fp16=True, optimizer={"type": "SGD"})
    made = create(jax.random.key(0))
    tx = optax.chain(optax.clip(1.0), zero.optimizer())
    inside = made.replace(tx=tx, opt_state=tx.init(made.params))
    with pytest.raises(ValueError, match="Wrap only the outermost transformation"):
        zero(step)(inside, batches(1)[0])
    scaled = made.replace(tx=zero.optimizer(), opt_state=zero.optimizer().init(made.params))
    with pytest.raises(ValueError, match=r"fp16 is off, but .* has a loss scale"):
        zero_for(1)(step)(scaled, batches(1)[0])


@pytest.mark.parametrize(
    ("width", "wide"),
    [(64, 256), (100, 1004), (101, 103)],  # split evenly, in parts along two dimensions, padded
)
def test_a_loop_rounds_each_layer_of_the_masters(width: int, wide: int) -> None:
    def create() -> TrainState:
        keys = jax.random.split(jax.random.key(0))
        shapes = {"up": (5, width, wide), "down": (5, wide, width)}
        pairs = zip(shapes.items(), keys, strict=True)
        params = {k: 0.1 * jax.random.normal(key, shape) for (k, shape), key in pairs}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.01))

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(x @ w["up"]) @ w["down"], None

            x = jax.lax.scan(jax.checkpoint(layer), batch.astype(jnp.bfloat16), params)[0]
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    batch = np.random.default_rng(0).normal(size=(16, width)).astype("float32")
    found = []
    for stage in (0, 3):
        zero = zerojax.zero(stage=stage, bf16=True, stage3_param_persistence_threshold=0)
        state, losses = zero.init(create), []
        for _ in range(3):
            state, loss = zero(step)(state, batch)
            losses.append(float(loss))
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-2)
    assert found[0][-1] < found[0][0]
