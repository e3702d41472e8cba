"""Policies by name, and what leaves for the host where the config asks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax.offload.activations import SMALLEST, smallest_away


def gradient(policy: str) -> Any:
    def block(x: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.sin(x @ x), "hidden") @ x)

    grad = jax.grad(lambda x: jax.checkpoint(block, policy=zerojax.remat_policy(policy))(x).sum())
    return jax.make_jaxpr(grad)(jnp.ones((4, 4)))


def kept(policy: str) -> int:
    """How many arrays the block's backward pass is given."""
    (again,) = [e for e in gradient(policy).eqns if e.params.get("differentiated")]
    return len(again.invars)


@pytest.mark.parametrize("policy", ["everything", "dots", "dots_no_batch", "names:hidden"])
def test_more_is_kept_than_inputs(policy: str) -> None:
    assert kept(policy) > kept("nothing")


def test_offloaded_by_name() -> None:
    for policy in ("offload:hidden", "offload_dots_no_batch"):
        assert "device_put" in str(gradient(policy))
    assert "device_put" not in str(gradient("names:hidden"))


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("dot", "did you mean 'dots'"),
        ("ofload:a", "did you mean 'offload:a,b'"),
        ("names", "did you mean 'names:a,b'"),
        ("names:", "lacks a name"),
        ("offload:a,,b", "lacks a name"),
        ("dots:a", "There are 'nothing'"),
    ],
)
def test_unknown_policies(policy: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        zerojax.remat_policy(policy)


def test_only_where_the_config_asks() -> None:
    assert smallest_away(zerojax.ZeroConfig(stage=2)) is None
    assert smallest_away(zerojax.ZeroConfig(stage=2, cpu_checkpointing=True)) == SMALLEST


WIDTH, ROWS, LAYERS = 256, 512, 3  # SMALLEST elements of a layer's input on each of two devices


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) @ w


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    again = jax.checkpoint(layer, prevent_cse=False)
    return jnp.asarray(jax.lax.scan(lambda x, w: (again(x, w), None), x, ws)[0])


def unrolled(ws: jax.Array, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.checkpoint(layer)(x, w)
    return x


def create(shape: tuple[int, ...] = (LAYERS, WIDTH, WIDTH)) -> TrainState:
    ws = jax.random.normal(jax.random.key(0), shape) / shape[-1]
    return TrainState.create(apply_fn=None, params={"ws": ws}, tx=optax.sgd(0.1))


def train_step(network: Any, state: TrainState, batch: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(network(params["ws"], batch).astype(jnp.float32)))

    value, grads = zerojax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def step_of(network: Any, **config: Any) -> Any:
    """A state and a step of it on two devices."""
    zero = zerojax.zero(mesh=zerojax.mesh(2), **config)
    return zero.init(create), zero(lambda state, batch: train_step(network, state, batch))


def batch(rows: int = ROWS) -> Any:
    return np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("float32")


FP16 = {"fp16": True, "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 8}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(3, FP16), (1, {})])
def test_same_numbers(stage: int, precision: dict[str, Any]) -> None:
    """Bit for bit, over 30 steps."""
    found, programs = [], []
    for away in (False, True):
        state, step = step_of(scanned, stage=stage, cpu_checkpointing=away, **precision)
        programs.append(step.lower(state, batch()).as_text())
        losses = []
        for _ in range(30):
            state, loss = step(state, batch())
            losses.append(float(loss))
        skipped = int(zerojax.telemetry(state)["skipped_steps"])
        found.append((losses, skipped, state.params["ws"]))
    assert losses[-1] < losses[0]
    assert (2 < skipped < 20) == bool(precision)
    assert programs[0] != programs[1]
    for got, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_says_once_where_nothing_can_leave(caplog: pytest.LogCaptureFixture) -> None:
    config = {"stage": 3, "gradient_accumulation_steps": 2}
    state, step = step_of(unrolled, cpu_checkpointing=True, **config)
    for rows in (2 * ROWS, 4 * ROWS):  # traced anew, and the step twice in each
        step.lower(state, batch(rows))
    (record,) = caplog.records
    assert record.name == "zerojax"
    assert "cpu_checkpointing has no effect" in record.message
    assert "remat_policy('offload:" in record.message


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_what_a_gpu_saves() -> None:
    """At least half of the layers' inputs, where the backward pass needs the most memory."""
    layers, width, rows = 48, 2048, 16384
    device, host = [], []
    for away in (False, True):
        mesh = zerojax.topology("h100", 1)
        zero = zerojax.zero(stage=3, mesh=mesh, bf16=True, cpu_checkpointing=away)
        state = zero.abstract_state(functools.partial(create, (layers, width, width)))
        inputs = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
        step = zero(lambda state, batch: train_step(scanned, state, batch))
        memory = step.lower(state, inputs).compile().memory_analysis()
        device.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        host.append(memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes)
    residuals = 2 * layers * rows * width
    assert device[0] - device[1] >= residuals / 2
    assert host[1] - host[0] >= residuals
