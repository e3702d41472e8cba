"""Functions that update nothing: the numbers of plain jit, at every stage and in micro-batches."""

import gc
import logging
import re
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

WIDTH, CLASSES = 16, 8
KEY = jax.random.key(0)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return x + nn.Dense(WIDTH)(nn.relu(nn.LayerNorm()(x))), None


class Net(nn.Module):
    """A stack of layers, as large models have it, and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return nn.Dense(CLASSES)(stack(name="h")(x, None)[0])


NET = Net()


def create(key: jax.Array) -> TrainState:
    params = NET.init(key, jnp.ones((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=NET.apply, params=params, tx=optax.adam(1e-2))


def batch_of(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    return {
        "x": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "label": rng.integers(CLASSES, size=rows).astype(np.int32),
        "weight": rng.random(rows).astype(np.float32),
        "temperature": np.float32(2),
    }


def scores(state: TrainState, batch: Any, scale: float = 1.0) -> Any:
    """What evaluations return: a row for each row, means, a masked one, counts, extremes."""
    logits = state.apply_fn({"params": state.params}, batch["x"]) / batch["temperature"]
    wide = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(wide, batch["label"])
    guess, weight = logits.argmax(-1), batch["weight"].astype(jnp.float32)
    return {
        "logits": logits,
        "turned": wide.T,
        "loss": losses.mean(),
        "masked": scale * jnp.sum(losses * weight) / jnp.sum(weight),
        "perplexity": jnp.exp(losses.mean()),
        "right": jnp.sum(guess == batch["label"]),
        "worst": losses.max(),
        "finite": jnp.isfinite(losses).all(),
        "pairs": jnp.zeros((CLASSES, CLASSES), jnp.int32).at[batch["label"], guess].add(1),
        "gram": wide.T @ wide,
        "rows": len(losses),
        "step": state.step,
        "norm": optax.tree.norm(state.params),
    }


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def plain(function: Any, state: TrainState, batch: Any, dtype: Any = jnp.float32) -> Any:
    """By jit alone, on one device, with the parameters that a step would compute with."""
    params = jax.tree.map(np.asarray, zerojax.on_device(state.params))
    bare = TrainState.create(apply_fn=NET.apply, params=cast(params, dtype), tx=optax.sgd(0.1))
    bare = bare.replace(step=state.step)
    return jax.jit(function)(bare, batch)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, got, want)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Any:
    """Nothing is said, so that what can be cut was."""
    with caplog.at_level(logging.WARNING, "zerojax"):
        yield
    assert not [record.getMessage() for record in caplog.get_records("call")]


SLOW = [(2, 1, 13), (0, None, 16)]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("stage", "micro", "rows"),
    [(3, 2, 21), (3, None, 5), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)],
)
def test_numbers_of_plain_jit(stage: int, micro: int | None, rows: int) -> None:
    zero = zero_for(stage, train_micro_batch_size_per_gpu=micro)
    state, batch = zero.init(create, KEY), batch_of(rows)
    want = plain(lambda *given: scores(*given, 3.0), state, batch)
    close(zero.evaluate(scores)(state, batch, scale=3.0), want)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("precision", "dtype", "micro"), [("bf16", jnp.bfloat16, 1), ("fp16", jnp.float16, None)]
)
def test_low_precision_as_in_a_step(precision: str, dtype: Any, micro: int | None) -> None:
    zero = zero_for(3, train_micro_batch_size_per_gpu=micro, **{precision: True})
    state, batch = zero.init(create, KEY), batch_of(13)

    @zero.evaluate
    def seen(state: TrainState, batch: Any) -> Any:
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(dtype)}
        return scores(state, batch)

    want = plain(scores, state, batch, dtype)
    assert seen(state, batch)["logits"].dtype == want["logits"].dtype
    close(seen(state, batch), want, 3e-2)


def test_a_norm_of_the_parameters_is_computed_on_shards() -> None:
    zero = zero_for(3)
    state = zero.init(create, jax.random.key(0))

    @zero.evaluate
    def norms(state: TrainState, batch: Any) -> Any:
        params = jax.tree.leaves(state.params)
        return sum(jnp.vdot(x, x) + jnp.linalg.norm(x.ravel()) for x in params) + batch["x"].sum()

    ((_, lowered, _),) = norms.programs(state, batch_of(8))
    assert {each.kind for each in collectives(lowered.compile().as_text())} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("where", "micro"), [("nvme", None), ("cpu", 1)])
def test_offloaded_state(tmp_path: Path, where: str, micro: int | None) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    place: Any = disk if where == "nvme" else "cpu"
    sections = {"offload_optimizer": place, "offload_param": place}
    zero = zero_for(
        3, bf16=True, train_micro_batch_size_per_gpu=micro, mesh=zerojax.mesh(2), **sections
    )
    state, batch = zero.init(create, KEY), batch_of(6)
    evaluate = zero.evaluate(scores)
    close(evaluate(state, batch), plain(scores, state, batch, jnp.bfloat16), 3e-2)

    @zero
    def train_step(state: TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: scores(state.replace(params=p), batch)["loss"])(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    if micro is None:
        after, _ = train_step(state, batch)
        with pytest.raises(ValueError, match="an earlier step took over the memory"):
            evaluate(state, batch)
        close(evaluate(after, batch), plain(scores, after, batch, jnp.bfloat16), 3e-2)


def test_state_is_kept_as_it_is() -> None:
    zero = zero_for(3)
    state = zero.init(create, KEY)
    before = jax.tree.map(np.asarray, state)
    zero.evaluate(scores)(state, batch_of(8))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)


class AveragedState(TrainState):
    average: Any


def test_average_of_the_parameters_is_gathered_as_they_are() -> None:
    zero = zero_for(3)

    def averaged(key: jax.Array) -> TrainState:
        state = create(key)
        return AveragedState.create(
            apply_fn=state.apply_fn, params=state.params, tx=state.tx,
            average=jax.tree.map(lambda p: p / 2, state.params),
        )  # fmt: skip

    state, batch = zero.init(averaged, KEY), batch_of(8)
    evaluate = zero.evaluate(lambda s, b: scores(s.replace(params=s.average), b))
    halves = jax.tree.map(lambda p: p / 2, zerojax.on_device(state.params))
    close(evaluate(state, batch), plain(scores, state.replace(params=halves), batch))


class TestRowsThatMeet:
    """Functions that cannot be cut run on the full batch, and say so once. What cannot be cut, and
    why, is in test_rows.py."""

    @pytest.mark.parametrize(
        ("function", "says"),
        [
            (lambda s, b: b["x"] - b["x"].mean(0), "sub takes rows together with a result"),
            (lambda s, b: jnp.median(b["weight"]), "rows together"),
        ],
    )
    def test_run_unsplit(self, function: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
        zero = zero_for(0, train_micro_batch_size_per_gpu=1, mesh=zerojax.mesh(2))
        state, batch = zero.init(create, KEY), batch_of(20)
        evaluate = zero.evaluate(function)
        for _ in range(2):
            close(evaluate(state, batch), plain(function, state, batch))
        (message,) = caplog.messages
        assert "runs on all 20 rows at once, not in 10 micro-batches of 2: " in message
        assert re.search(says, message), message

    def test_rows_that_do_not_divide_run_everywhere(self, caplog: pytest.LogCaptureFixture) -> None:
        zero = zero_for(3)
        state, batch = zero.init(create, KEY), batch_of(5)
        function = lambda s, b: jnp.sort(scores(s, b)["logits"], 0)  # noqa: E731
        close(zero.evaluate(function)(state, batch), plain(function, state, batch))
        assert "as they do not divide among 8" in caplog.text


class NNXNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a, self.b = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, CLASSES, rngs=rngs)
        self.norm = nnx.BatchNorm(32, use_running_average=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.relu(self.norm(self.a(x))))


def made() -> tuple[NNXNet, nnx.Optimizer]:
    model = NNXNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def metrics() -> nnx.MultiMetric:
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


class TestNNX:
    @pytest.mark.usefixtures("quiet")
    def test_model_alone_and_with_metrics(self) -> None:
        zero = zero_for(3, train_micro_batch_size_per_gpu=1)
        model, _ = zero.init(made)
        batch, (other, _) = batch_of(21), made()

        def predict(model: Any, batch: Any) -> Any:
            return model(batch["x"])

        close(zero.evaluate(predict)(model, batch), nnx.jit(predict)(other, batch))

        def eval_step(model: Any, seen: Any, batch: Any) -> None:
            logits = model(batch["x"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            seen.update(loss=loss, logits=logits, labels=batch["label"])

        got, want = metrics(), metrics()
        evaluate, jitted = zero.evaluate(eval_step), nnx.jit(eval_step)
        for rows in (21, 16):
            evaluate(model, got, batch_of(rows))
            jitted(other, want, batch_of(rows))
        close(got.compute(), want.compute())

    def test_with_an_optimizer_and_rngs_in_any_order(self) -> None:
        zero = zero_for(3)
        model, optimizer = zero.init(made)
        (other, second), batch = made(), batch_of(8)

        def noisy(batch: Any, rngs: Any, model: Any, *, optimizer: Any) -> Any:
            return model(batch["x"]) + rngs.normal((CLASSES,)) + optimizer.step[...]

        got, want = nnx.Rngs(3), nnx.Rngs(3)
        evaluate, jitted = zero.evaluate(noisy), nnx.jit(noisy)
        for _ in range(2):
            close(
                evaluate(batch, got, model, optimizer=optimizer),
                jitted(batch, want, other, optimizer=second),
            )

    def test_objects_that_are_returned_are_the_callers(self) -> None:
        zero = zero_for(3)
        model, _ = zero.init(made)
        out, same = zero.evaluate(lambda model, batch: (model(batch["x"]), model))(
            model, batch_of(8)
        )
        assert same is model
        assert out.shape == (8, CLASSES)

    def test_parameters_in_host_memory(self) -> None:
        zero = zero_for(3, offload_optimizer="cpu", offload_param="cpu")
        model, _ = zero.init(made)
        predict = zero.evaluate(lambda model, batch: model(batch["x"]))
        close(predict(model, batch_of(8)), made()[0](batch_of(8)["x"]))

    def test_parameters_are_not_changed(self) -> None:
        zero = zero_for(3)
        model, _ = zero.init(made)

        @zero.evaluate
        def sets(model: Any, batch: Any) -> None:
            model.a.bias[...] = model.a.bias[...] + 1

        with pytest.raises(TypeError, match=r"changes no parameter.*'a'.*'bias'"):
            sets(model, batch_of(8))

    def test_variables_are_not_added(self) -> None:
        zero = zero_for(0)
        model, _ = zero.init(made)
        adds = zero.evaluate(lambda model, batch: setattr(model, "x", nnx.Variable(batch["x"])))
        with pytest.raises(TypeError, match=r"adds or removes NNX variables.*zero.evaluate"):
            adds(model, batch_of(8))


class TestRefused:
    def test_no_batch(self) -> None:
        zero = zero_for(0)
        with pytest.raises(TypeError, match=r"got only the state.*with a state and a batch"):
            zero.evaluate(lambda *args: None)(zero.init(create, KEY))

    def test_no_rows(self) -> None:
        zero = zero_for(0)
        with pytest.raises(ValueError, match="the batch is empty"):
            zero.evaluate(scores)(zero.init(create, KEY), batch_of(0))


@pytest.mark.parametrize("kind", ["TrainState", "NNX"])
def test_a_program_lets_the_state_go(kind: str) -> None:
    zero = zerojax.zero(stage=3)

    def kernel(state: Any) -> Any:
        return state.params["w"] if kind == "TrainState" else state.kernel.get_value()

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))

    state = zero.init(create) if kind == "TrainState" else nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    total = zero.evaluate(lambda state, batch: jnp.sum(batch @ kernel(state)))
    total(state, jnp.ones((8, 8)))
    array = weakref.ref(kernel(state))
    del state
    gc.collect()
    assert array() is None
