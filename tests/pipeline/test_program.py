"""Steps in pipeline stages against plain jit on one device."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, host
from flax import nnx
from flax.training.train_state import TrainState
from pipeline import models
from pipeline.models import batches

import zerojax

STEPS = 3

pytestmark = pytest.mark.usefixtures("quick_compile")


def zero_over(
    axes: dict[str, int], micro_batches: int, stage: int = 1, **keywords: Any
) -> zerojax.Zero:
    mesh = zerojax.mesh(math.prod(axes.values()), axes=axes)
    keywords = {"gradient_clipping": 0.0, "stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(
        stage=stage, gradient_accumulation_steps=micro_batches, mesh=mesh, **keywords
    )


def zero_on(
    stages: int, data: int, micro_batches: int, stage: int = 1, **keywords: Any
) -> zerojax.Zero:
    return zero_over({"stage": stages, "data": data}, micro_batches, stage, **keywords)


@functools.cache
def started(model: str, dtype: str) -> TrainState:
    """Returns the initial state of a model of :func:`pipeline.models.create`, on one device."""

    def cast(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    return jax.tree.map(cast, models.create(model))


def follow(step: Callable[..., Any], state: TrainState, rows: int, steps: int) -> Any:
    """Returns what a step returned in each of some steps, and the parameters at the end."""
    results = []
    for tokens in batches(rows, steps):
        state, result = step(state, tokens)
        results.append(result)
    return host((results, state.params))


@functools.cache
def plain(model: str, dtype: str, step: Callable[..., Any], rows: int, steps: int) -> Any:
    return follow(jax.jit(step), started(model, dtype), rows, steps)


def check(
    zero: zerojax.Zero,
    model: str,
    step: Callable[..., Any] | None = None,
    *,
    rows: int = 16,
    steps: int = STEPS,
    dtype: str | None = None,
) -> None:
    """Fails where losses or parameters differ from plain jit.

    Args:
      model: A model of :func:`pipeline.models.create`.
      step: Its step; default that of a language model.
      dtype: Of the numbers; default float64, except for models that compute in float32.
    """
    step = step or (models.t5_step if model == "t5" else models.train_step)
    dtype = dtype or ("float32" if model in ("llama", "gpt", "t5") else "float64")
    with jax.enable_x64(dtype == "float64"):
        state = started(model, dtype)
        got = follow(zero(step), zero.init(lambda: state), rows, steps)
        assert_near(got, plain(model, dtype, step, rows, steps), TOLERANCE[dtype])


@pytest.mark.slow
def test_numbers_of_one_step() -> None:
    check(zero_on(2, 2, 4), "sgd", steps=1, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes", "micro_batches", "stage"),
    [
        ("remat", {"data": 2, "stage": 4}, 8, 1),
        ("experts dropout", {"stage": 2, "data": 2}, 4, 3),
        ("llama", {"replica": 2, "stage": 2, "data": 2}, 4, 2),
        ("t5", {"stage": 4, "data": 1}, 4, 3),
    ],
    ids=str,
)
def test_numbers_are_those_of_plain_jit(
    model: str, axes: dict[str, int], micro_batches: int, stage: int
) -> None:
    check(zero_over(axes, micro_batches, stage), model)


def contrastive_step(state: Any, tokens: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        out, _ = state.apply_fn({"params": params}, tokens)
        rows = out.mean(1)
        return -jnp.diagonal(jax.nn.log_softmax(rows @ rows.T)).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.slow
def test_few_micro_batches_and_a_loss_between_rows(caplog: pytest.LogCaptureFixture) -> None:
    """They are split in two, so that there are four; stages idle for 43% of the ticks."""
    check(zero_on(4, 2, 2), "", contrastive_step)
    assert sum("idles" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_nnx() -> None:
    losses = []
    for run in (zero_on(2, 2, 4), nnx.jit):
        model = models.NNXStack(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        step = run(models.nnx_step)
        losses.append([float(step(model, optimizer, tokens)) for tokens in batches(16, STEPS)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def refused(
    zero: zerojax.Zero,
    match: str,
    create: Callable[[], Any] = models.stack,
    step: Callable[..., Any] = models.train_step,
    rows: int = 16,
) -> None:
    """Fails unless a step is refused as soon as it is traced."""
    with pytest.raises(ValueError, match=match):
        zero(step).lower(zero.abstract_state(create), batches(rows, 1)[0])


def test_rows_that_a_layer_combines_are_refused() -> None:
    match = r"train_step cannot run in pipeline stages: a layer .* \(GroupNorm\)"
    refused(zero_on(2, 2, 4), match, lambda: models.stack("balanced"))


def test_prints_in_layers_are_refused() -> None:
    def train_step(state: Any, tokens: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            jax.debug.print("{}", x.sum())
            return x @ w, None

        def loss(params: Any) -> jax.Array:
            return jax.lax.scan(layer, tokens.astype(float), params["w"])[0].mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    def create() -> TrainState:
        params = {"w": jnp.ones((4, 8, 8))}
        return TrainState.create(apply_fn=None, params=params, tx=models.SGD)

    refused(zero_on(2, 2, 4), "a layer prints, or calls back into Python", create, train_step)


def test_stages_must_divide_the_layers() -> None:
    match = r"do not divide the 6 layers .* one of \[1, 2, 3, 6\]"
    refused(zero_on(4, 2, 4), match, lambda: models.stack(layers=6))


def test_offload_is_refused() -> None:
    zero = zero_on(2, 2, 4, offload_optimizer={"device": "cpu"})
    refused(zero, "offload_optimizer .* pipeline stages")


def pair_step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        x = params["table"][tokens]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return (x**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optax.adam(1e-2).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_and_optimizer_state_as_arguments(stage: int) -> None:
    def create() -> Any:
        table, layers = jax.random.split(jax.random.key(0))
        params = {
            "table": jax.random.normal(table, (models.VOCABULARY, 8)),
            "layers": jax.random.normal(layers, (4, 8, 8)) / 3,
        }
        return params, optax.adam(1e-2).init(params)

    zero = zero_on(2, 2, 4, stage)
    runs = []
    for step, state in ((jax.jit(pair_step), create()), (zero(pair_step), zero.init(create))):
        losses = []
        for tokens in batches(16, STEPS):
            *state, loss = step(*state, tokens)
            losses.append(loss)
        runs.append((losses, host(state)))
    layers = [x.sharding.spec for x in jax.tree.leaves(state) if x.shape == (4, 8, 8)]
    assert [spec[0] for spec in layers] == ["stage"] * 3
    assert_near(*runs, TOLERANCE["float32"])
