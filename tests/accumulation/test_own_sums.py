"""Steps that devices cannot run apart, and those that they can, under error feedback."""

from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from swept import swept

import zerojax
from zerojax.config import ConfigError

pytestmark = pytest.mark.usefixtures("quick_compile")
WIDTH = 128
Loss = Callable[[Any, Any], jax.Array]


def start() -> TrainState:
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(256, WIDTH)), "head": rng.normal(size=(WIDTH, 256))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


def batch() -> Any:
    rng = np.random.default_rng(1)
    return {
        "x": rng.integers(256, size=(16, 3), dtype=np.int32),
        "y": rng.normal(size=(16, 256)).astype(np.float32),
    }


def embedded(p: Any, b: Any) -> jax.Array:
    return p["table"][b["x"]].mean(1)


def mean(p: Any, b: Any) -> jax.Array:
    return jnp.mean((embedded(p, b) @ p["head"] - b["y"]) ** 2)


def convolved(p: Any, b: Any) -> jax.Array:
    h = p["table"][b["x"]]
    kernel = jnp.ones((3, WIDTH, WIDTH))
    h = lax.conv_general_dilated(h, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.mean((h.mean(1) @ p["head"] - b["y"]) ** 2)


def noisy(p: Any, b: Any) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, b["y"].shape)
    return mean(p, {**b, "y": b["y"] * keep})


def chosen(p: Any, b: Any) -> jax.Array:
    return lax.cond(p["head"][0, 0] > 0, lambda p: mean(p, b), lambda p: 2 * mean(p, b), p)


def normalized(p: Any, b: Any) -> jax.Array:
    h = embedded(p, b) @ p["head"]
    return jnp.mean((h - h.mean(0)) ** 2)


def tied(p: Any, b: Any) -> jax.Array:
    return jnp.mean((embedded(p, b) @ p["table"].T - b["y"]) ** 2)


def scaled_by_a_row(p: Any, b: Any) -> jax.Array:
    """Makes something of a parameter's shape of the parameter and rows."""
    each = jax.vmap(lambda x, y: jnp.sum((p["table"][x].mean(0) @ (p["head"] * y) - y) ** 2))
    return jnp.mean(each(b["x"], b["y"])) / 256


def step_of(loss: Loss) -> Any:
    def step(state: TrainState, b: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, b)
        return state.apply_gradients(grads=grads), value

    return step


def clipped(state: TrainState, b: Any) -> Any:
    value, grads = jax.value_and_grad(mean)(state.params, b)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.01 / norm), grads)
    return state.apply_gradients(grads=grads), value


def raveled(state: TrainState, b: Any) -> Any:
    value, grads = jax.value_and_grad(mean)(state.params, b)
    flat, unravel = jax.flatten_util.ravel_pytree(grads)
    return state.apply_gradients(grads=unravel(0.5 * flat)), value


def twice(state: TrainState, b: Any) -> Any:
    for _ in range(2):
        value, grads = jax.value_and_grad(mean)(state.params, b)
        state = state.apply_gradients(grads=grads)
    return state, value


def zero_of(stage: int = 2, **more: Any) -> zerojax.Zero:
    return zerojax.zero(
        stage=stage,
        stage3_param_persistence_threshold=0,
        zero_quantized_gradients=True,
        zeropp_loco_param={},
        **more,
    )


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (step_of(convolved), "conv_general_dilated at test_own_sums.py"),
        (step_of(noisy), "random_bits at test_own_sums.py"),
        (step_of(chosen), "cond at test_own_sums.py"),
        (step_of(normalized), "within the rows .* Make the loss a sum or a mean over rows"),
        (twice, "updates 2 times"),
    ],
    ids=["convolution", "noise", "choice", "batch statistics", "two updates"],
)
def test_what_devices_cannot_run_apart_is_refused(step: Any, names: str) -> None:
    with pytest.raises(ValueError, match=rf"{names}.*zeropp_loco_param out"):
        zero_of()(step).lower(start(), batch())


@pytest.mark.parametrize("stage", swept([3, 1]))
@pytest.mark.parametrize(
    "step",
    [step_of(tied), step_of(scaled_by_a_row), clipped, raveled],
    ids=["tied", "scaled by a row", "clipped", "raveled"],
)
def test_a_gradient_by_way_of_something_else(stage: int, step: Any) -> None:
    """All but rounded as without quantization, and each device has errors left."""
    got, value = zero_of(stage)(step)(start(), batch())
    want, plain = jax.jit(step)(start(), batch())
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    for name, before in start().params.items():
        change = np.abs(want.params[name] - before).max()
        np.testing.assert_allclose(got.params[name], want.params[name], atol=0.05 * change)
        left = np.abs(got.tx.numbers.error[name][0]).max((1, 2))
        assert np.all(left > 0) if change else not np.any(left)


def test_other_axes_are_refused() -> None:
    zero = zero_of(mesh=zerojax.mesh(axes={"data": 4, "model": 2}))
    with pytest.raises(ConfigError, match=r"zeropp_loco_param: the axes \{'model': 2\}"):
        zero(step_of(mean)).lower(start(), batch())


def test_two_replica_groups_have_the_numbers_of_the_global_batch() -> None:
    zero = zero_of(mesh=zerojax.mesh(replicas=2))
    got, _ = zero(step_of(mean))(start(), batch())
    want, _ = jax.jit(step_of(mean))(start(), batch())
    change = np.abs(want.params["head"] - start().params["head"]).max()
    np.testing.assert_allclose(got.params["head"], want.params["head"], atol=0.05 * change)
    assert got.tx.numbers.error["head"][0].shape[0] == 8


def test_a_function_of_each_devices_rows_is_refused() -> None:
    zero = zero_of()

    @zero.per_device
    def doubled(x: jax.Array) -> jax.Array:
        return 2 * x

    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((doubled(embedded(p, b)) @ p["head"] - b["y"]) ** 2)

    with pytest.raises(ValueError, match=r"per_device\(doubled\).*zeropp_loco_param out"):
        zero(step_of(loss)).lower(start(), batch())


@pytest.mark.sweep
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axes", [{"replica": 4, "data": 2}, {"data": 6}, {"data": 1}], ids=str)
def test_on_other_meshes(axes: dict[str, int], stage: int, k: int, form: str) -> None:
    """With six devices no table divides evenly: nothing is quantized, and all is exact."""
    devices = int(np.prod(list(axes.values())))
    zero = zero_of(
        stage,
        gradient_accumulation_steps=k,
        zero_quantized_gradients_dtype=form,
        mesh=zerojax.mesh(devices, axes=axes),
    )
    rows = jax.tree.map(lambda x: np.concatenate([x, x, x]), batch())
    got, _ = zero(step_of(mean))(start(), rows)
    want, _ = jax.jit(step_of(mean))(start(), rows)
    for name, x in start().params.items():
        change = np.abs(want.params[name] - x).max()
        atol = (0.3 if form == "int4" else 0.05) * change
        np.testing.assert_allclose(got.params[name], want.params[name], atol=atol)
