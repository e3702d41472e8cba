"""A step in micro-batches beside the plain step on the global batch."""

import logging
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
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxprs import equations

import zerojax
from zerojax.xla.jaxprs import scan_parts

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS = 16


class State(TrainState):
    average: Any = None
    key: Any = None
    seen: Any = None


def params() -> Any:
    rng = np.random.default_rng(0)
    return {"a": jnp.array(rng.normal(size=(8, 8))), "b": jnp.array(rng.normal(size=(8, 4)))}


def start(**fields: Any) -> State:
    return State.create(apply_fn=None, params=params(), tx=optax.adam(1e-2), **fields)


def apply(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"]


def batch() -> Any:
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(ROWS, 8)),
        "y": rng.normal(size=(ROWS, 4)),
        "label": rng.integers(4, size=ROWS, dtype=np.int32),
    }


def losses(kind: str) -> Callable[[Any, Any], jax.Array]:
    def loss(p: Any, b: Any) -> jax.Array:
        out = apply(p, b["x"])
        if kind == "sum":
            return jnp.sum((out - b["y"]) ** 2)
        if kind == "labels by row number":
            return -jax.nn.log_softmax(out)[jnp.arange(len(out)), b["label"]].mean()
        if kind == "row by row":
            row = lambda b: jnp.mean((apply(p, b["x"]) - b["y"]) ** 2)  # noqa: E731
            return jax.lax.map(row, b).mean()
        if kind == "numbers of rows":  # as parameters of what has no rows
            n = len(out)
            scale = jax.lax.fori_loop(0, n, lambda i, c: 1.01 * c, p["a"][0, 0] ** (n + 2))
            return jnp.mean(out * scale)
        if kind == "sliced":
            both = apply(p, jnp.concatenate([b["x"], b["y"] @ jnp.ones((4, b["x"].shape[1]))]))
            return jnp.mean((both[: len(b["x"])] - 0.1 * both[len(b["x"]) :]) ** 2)
        weights = (b["y"][:, 0] - b["y"][:, 0].mean()) / b["y"][:, 0].std()
        return jnp.mean(weights * out[:, 0])

    return loss


KINDS = [
    "sum",
    "labels by row number",
    "row by row",
    "numbers of rows",
    "sliced",
    "normalised by the batch",
]


def plain_and_accumulated(
    step: Callable[..., Any],
    fields: Callable[[], dict[str, Any]],
    devices: int,
    k: int,
    stage: int = 3,
) -> tuple[Any, Any]:
    with jax.enable_x64(True):
        zero = zero_for(stage, k=k, mesh=zerojax.mesh(devices))
        runs = []
        for run in (jax.jit(step), zero(step)):
            state = start(**fields())
            for _ in range(2):
                state, out = run(state, batch())
            runs.append((state, out))
        return runs[0], runs[1]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


# Devices, micro-batches, stage.
WHERE = [(1, ROWS, 3), (1, 2, 3), (2, 4, 3), (2, 4, 1), (4, 4, 0)]


def with_loss(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    def step(state: State, b: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, b)
        return state.apply_gradients(grads=grads), value

    return step


def exactly(
    step: Callable[..., Any], devices: int, k: int, stage: int = 3, **fields: Callable[[], Any]
) -> None:
    """Without a compile, see ``tests/emitted.py``."""

    def create() -> State:
        return start(**{name: make() for name, make in fields.items()})

    source = emitted.Source(create, step, (emitted.in_float32(batch(), ROWS),), rows=ROWS)
    emitted.check(source, stage, k, zerojax.mesh(devices))


@pytest.mark.parametrize(("devices", "k", "stage"), WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_losses(kind: str, devices: int, k: int, stage: int) -> None:
    """With micro-batches of one row, too, for which jax writes other programs."""
    exactly(with_loss(losses(kind)), devices, k, stage)


@pytest.mark.parametrize(("k", "traces"), [(1, 1), (2, 2)])
def test_how_often_functions_are_traced(k: int, traces: int) -> None:
    calls = {"step": 0, "evaluate": 0}

    def step(state: Any, b: Any) -> Any:
        calls["step"] += 1
        loss, grads = jax.value_and_grad(losses("sum"))(state.params, b)
        return state.apply_gradients(grads=grads), loss

    def evaluate(state: Any, b: Any) -> jax.Array:
        calls["evaluate"] += 1
        return losses("sum")(state.params, b)

    zero = zero_for(1, k, train_micro_batch_size_per_gpu=ROWS // 8 // k)
    state = zero.init(start)
    zero.evaluate(evaluate)(state, batch())
    zero(step)(state, batch())
    assert calls == {"step": traces, "evaluate": traces}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_follows_runs_once(stage: int) -> None:
    def step(state: State, b: Any) -> Any:
        def loss(p: Any) -> Any:
            out = apply(p, b["x"])
            target = jax.lax.stop_gradient(apply(state.average, b["x"]))
            return jnp.mean((out - b["y"]) ** 2) + jnp.mean((out - target) ** 2), out

        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        norm = optax.tree.norm(grads)
        new = state.apply_gradients(grads=jax.tree.map(lambda g: g * jnp.sqrt(value) / norm, grads))
        ok = jnp.isfinite(value) & (norm < 100)
        keep = lambda a, b: jax.tree.map(lambda x, y: jnp.where(ok, x, y), a, b)  # noqa: E731
        average = jax.lax.cond(new.step % 2 == 0, lambda: new.params, lambda: state.average)
        new = new.replace(
            params=keep(new.params, state.params),
            average=average,
            seen=state.seen + jnp.array([1, len(out)]),
        )
        hits = out.argmax(-1) == b["label"]
        return new, {
            "loss": value, "norm": norm, "max": out.max(), "min": out.min(), "any": hits.any(),
            "all": hits.all(), "hits": hits.sum(), "accuracy": hits.mean(), "step": state.step,
            "perplexity": jnp.exp(value), "rows": len(out), "total": out.sum(),
            "confusion": jnp.zeros((4, 4), int).at[b["label"], out.argmax(-1)].add(1),
        }  # fmt: skip

    exactly(step, 2, 4, stage, average=params, seen=lambda: jnp.zeros(2, int))


@pytest.mark.parametrize(
    ("asked", "summed"), [(None, "float32"), ("fp32", "float32"), ("bf16", "bfloat16")]
)
def test_the_dtype_of_sums(asked: str | None, summed: str) -> None:
    """``grad_accum_dtype`` is that of gradients alone."""
    x = emitted.in_float32(batch(), ROWS)
    program = emitted.emitted(
        emitted.Source(start, with_loss(losses("sum")), (x,), rows=ROWS), zerojax.mesh(2),
        stage=2, bf16=True, gradient_accumulation_steps=4, grad_accum_dtype=asked,
    )  # fmt: skip
    (loop,) = [
        eqn
        for _, eqn in equations(program.jaxpr)
        if eqn.primitive.name == "scan" and eqn.params["length"] == 4
    ]
    sums = [v.aval for v in loop.outvars[: scan_parts(loop).carry]]
    assert {str(x.dtype) for x in sums if x.ndim == 2} == {summed}
    assert {str(x.dtype) for x in sums if x.ndim == 0} == {"float32"}


def test_counts_that_the_state_keeps() -> None:
    def step(state: State, b: Any) -> Any:
        grads = jax.grad(losses("sum"))(state.params, b)
        return state.apply_gradients(grads=grads, seen=state.seen.at[b["label"]].add(1.5)), None

    exactly(step, 2, 4, seen=lambda: jnp.arange(4.0))


def test_arrays_of_rows_come_by_micro_batch() -> None:
    def step(state: State, b: Any) -> Any:
        grads = jax.grad(losses("sum"))(state.params, b)
        return state.apply_gradients(grads=grads), apply(state.params, b["x"])

    plain, mine = plain_and_accumulated(step, dict, 2, 4)
    assert mine[1].shape == (4, 4, 4)
    assert_same(mine[1].reshape(ROWS, 4), plain[1])


def test_a_hidden_state_comes_back_in_the_batchs_form() -> None:
    """So that the next call takes it, as in truncated backpropagation."""

    def step(state: State, hidden: Any, b: Any) -> Any:
        def loss(p: Any) -> Any:
            new = {"h": jnp.tanh(hidden["h"] + b["x"] @ p["a"]), "c": hidden["c"] + b["y"]}
            return jnp.mean((new["h"] @ p["b"] - new["c"]) ** 2), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), (new, {"loss": value, "again": new["h"]})

    with jax.enable_x64(True):
        runs = []
        for run in (
            jax.jit(step),
            zero_for(3, k=4, mesh=zerojax.mesh(2))(step, batch_argnums=(1, 2)),
        ):
            state, hidden = start(), {"h": jnp.zeros((ROWS, 8)), "c": jnp.zeros((ROWS, 4))}
            for _ in range(2):
                state, (hidden, out) = run(state, hidden, batch())
            runs.append((state.params, hidden, out["loss"], out["again"].reshape(ROWS, 8)))
        assert out["again"].shape == (4, 4, 8)
        assert_same(runs[1], runs[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_over_layers_returns_what_has_no_rows(stage: int) -> None:
    """The layers' parameters, as ``nnx.scan`` around ``nnx.remat`` does, and a value of them."""

    def step(state: State, b: Any) -> Any:
        def loss(layers: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return jnp.tanh(x @ w), (w, w.sum())

            x, kept = jax.lax.scan(jax.checkpoint(layer), b["x"], layers)
            return jnp.mean(x**2), kept

        layers = jnp.stack([state.params["a"], 2 * state.params["a"]])
        grads, (same, sums) = jax.grad(loss, has_aux=True)(layers)
        grads = {"a": grads.sum(0), "b": state.params["b"]}
        return state.apply_gradients(grads=grads, average=same), sums

    exactly(step, 2, 4, stage, average=lambda: jnp.zeros((2, 8, 8)))


def test_keys_pass_from_micro_batch_to_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    def step(state: State, b: Any) -> Any:
        key, mine = jax.random.split(state.key)
        noise = jax.random.normal(mine, b["y"].shape)
        grads = jax.grad(lambda p: jnp.mean((apply(p, b["x"]) - noise) ** 2))(state.params)
        new = state.apply_gradients(grads=grads)
        ok = jnp.isfinite(optax.tree.norm(grads))
        return new.replace(key=jnp.where(ok, key, state.key)), noise

    with caplog.at_level(logging.WARNING, logger="zerojax"):
        _, mine = plain_and_accumulated(step, lambda: {"key": jax.random.key(0)}, 2, 4)
    assert sum("noise in the batch's shape" in r.message for r in caplog.records) == 1
    noise = np.asarray(mine[1])
    assert len({x.tobytes() for x in noise}) == 4
    key = jax.random.key(0)
    for _ in range(8):
        key, _ = jax.random.split(key)
    np.testing.assert_array_equal(jax.random.key_data(mine[0].key), jax.random.key_data(key))


def on_the_host(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: np.tanh(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("stage", [0, 3])
def test_callbacks_on_all_rows_are_refused_by_name(stage: int) -> None:
    zero = zerojax.zero(stage=stage, gradient_accumulation_steps=2)
    step = with_loss(lambda p, b: jnp.mean((apply(p, b["x"]) - on_the_host(b["y"])) ** 2))
    with pytest.raises(
        ValueError,
        match=r"pure_callback at test_run.py:\d+, which passes all rows to Python.*jax.lax.map",
    ):
        zero(step)(start(), batch())


@pytest.mark.parametrize(
    "reshaped",
    [
        lambda x: x.reshape(ROWS, 2, 2),
        lambda x: x + jnp.zeros((ROWS, 1)),
        lambda x: {ROWS: x}[len(x)],
    ],
)
@pytest.mark.parametrize(("stage", "k"), [(0, 2), (3, ROWS)])
def test_the_batchs_size_as_a_number_is_named(reshaped: Any, stage: int, k: int) -> None:
    """With the user's line, and the rows with which the step was traced."""
    zero = zerojax.zero(stage=stage, gradient_accumulation_steps=k, mesh=zerojax.mesh(1))
    step = with_loss(lambda p, b: jnp.mean(reshaped(apply(p, b["x"])) ** 2))
    rows = ROWS // k if k < ROWS else 2
    with pytest.raises(
        ValueError, match=rf"traced on a micro-batch of {rows} rows.*test_run\.py:\d+"
    ) as caught:
        zero(step)(start(), batch())
    assert f"Replace the number {ROWS} by the array's own size" in str(caught.value)
    assert caught.value.__cause__.__cause__ is not None


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            lambda s, b: (
                s.apply_gradients(grads=jax.grad(losses("sum"))(s.params, b)).replace(
                    average=b["x"]
                ),
                0,
            ),
            ["state.average", "has rows of the batch in it"],
        ),
        (
            lambda s, b: (
                s.apply_gradients(grads=jax.grad(losses("sum"))(s.params, b)),
                {"deviation": apply(s.params, b["x"]).std()},
            ),
            ["its result['deviation']", "uses a number computed from all rows", "outside the step"],
        ),
    ],
)  # fmt: skip
def test_refused_by_name(step: Callable[..., Any], says: list[str]) -> None:
    zero = zerojax.zero(stage=1, gradient_accumulation_steps=2)
    state = start(average=jnp.zeros((ROWS, 8)))
    with pytest.raises(ValueError, match="cannot be accumulated over 2 micro-batches") as caught:
        zero(step)(state, batch())
    for words in says:
        assert words in str(caught.value), str(caught.value)


def by_kernel(x: jax.Array) -> jax.Array:
    """A Mosaic GPU kernel of a user's, for all rows at once."""

    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(double, out_type=out, grid=(1,), grid_names=("block",))
    return kernel(x)  # type: ignore[no-any-return]


def test_a_mosaic_gpu_kernel_is_refused_by_name() -> None:
    zero = zerojax.zero(stage=3, gradient_accumulation_steps=2, mesh=zerojax.mesh(1))
    step = with_loss(lambda p, b: jnp.mean(apply(p, by_kernel(b["x"])) ** 2))
    with pytest.raises(ValueError, match=r"custom_vmap_call at .*keep rows separate"):
        zero(step)(start(), batch())


@pytest.mark.parametrize("by", [pytest.param("keyword", marks=pytest.mark.slow), "json"])
def test_statistics_of_each_micro_batch_are_asked_for(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A mean and a variance that move with the batch, and with which its rows compute."""

    def run(state: State, b: Any) -> Any:
        def loss(p: Any) -> Any:
            out = apply(p, b["x"])
            mean, var = out.mean(0), out.var(0)
            kept = 0.9 * state.average + 0.1 * jnp.stack([mean, var])
            return jnp.mean(((out - mean) / jnp.sqrt(var + 1) - b["y"]) ** 2), kept

        return jax.value_and_grad(loss, has_aux=True)(state.params)

    def step(state: State, b: Any) -> Any:
        (value, kept), grads = run(state, b)
        return state.apply_gradients(grads=grads, average=kept, seen=state.seen + 1), value

    def trained(asked: dict[str, Any]) -> Any:
        config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2}
        zero = zerojax.zero(config | asked) if by == "json" else zerojax.zero(config, **asked)
        return zero(step)(given, batch())

    given = start(average=jnp.zeros((2, 4)), seen=jnp.zeros(()))
    with pytest.raises(
        ValueError, match=r"state\.average keeps .*test_run\.py:\d+.*to 1"
    ) as caught:
        trained({})
    assert "accumulate_statistics=True" in str(caught.value)
    with caplog.at_level(logging.WARNING, "zerojax"):
        state, value = trained({"accumulate_statistics": True})
    assert "computes statistics of its own rows" in caplog.text
    first, second = (
        {name: x[rows] for name, x in batch().items()} for rows in (slice(8), slice(8, None))
    )
    (one, kept), _ = run(given, first)
    (other, kept), _ = run(given.replace(average=kept), second)
    np.testing.assert_allclose(state.average, kept, rtol=1e-5)
    np.testing.assert_allclose(value, (one + other) / 2, rtol=1e-5)
    assert state.seen == 1


REFUSED = [  # a loss of what the model gives, the cause, and the remedy
    (lambda out, b: jnp.sqrt((out**2).mean()), "rows' gradients", "multiply it by the derivative"),
    (lambda out, b: (out - out.mean(0)).var(), "from all rows in each row.", "LayerNorm"),
    (lambda out, b: (out[::-1] * b["y"]).mean(), "combines rows", "before the step"),
    (lambda out, b: (out.T * (np.arange(len(out)) / 8)).mean(), "of its own with", "of the batch."),
    (lambda out, b: (out.T * (jnp.arange(len(out)) / 8)).mean(), "row numbers", "of the batch."),
    (lambda out, b: jax.lax.scan(lambda c, x: (c * x[0], 0), 1.0, out)[0], "loops", "for each row"),
    (
        lambda out, b: jax.lax.cond(out.sum() > 0, lambda: out, lambda: b["y"]).mean(),
        "chooses",
        "by",
    ),
]


@pytest.mark.parametrize(("loss", "cause", "remedy"), REFUSED)
def test_the_remedy_fits_the_cause(loss: Any, cause: str, remedy: str) -> None:
    zero = zerojax.zero(stage=1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"test_run\.py:\d+") as caught:
        zero(with_loss(lambda p, b: loss(apply(p, b["x"]), b)))(start(), batch())
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


def test_remedies_that_are_tried() -> None:
    """The root of a mean by its derivative; numbers of rows, and a permutation, in the batch."""

    def step(state: State, b: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            logits = jax.nn.log_softmax(apply(p, b["x"][:, ::-1]))
            mine = logits[np.arange(len(b["x"])), b["label"]]
            return jnp.mean((mine + np.ones(len(b["x"]))) ** 2 * b["number"])

        value, grads = jax.value_and_grad(loss)(state.params)
        grads = jax.tree.map(lambda g: g * 0.5 / jnp.sqrt(value), grads)
        return state.apply_gradients(grads=grads), jnp.sqrt(value)

    given = emitted.in_float32(batch(), ROWS) | {"number": np.arange(ROWS, dtype=np.float32)}
    for k in (2, ROWS):
        emitted.check(emitted.Source(start, step, (given,), rows=ROWS), 1, k, zerojax.mesh(1))
