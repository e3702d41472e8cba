"""A step that is written for explicit mesh axes computes what plain jit does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

P = PartitionSpec
TX = optax.adamw(1e-2)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(32, 10)), "y": rng.normal(size=(32, 4))}


# How a model is written for explicit axes: each result that could lie in several ways says how.


def mlp(params: Any, x: jax.Array, how: str) -> jax.Array:
    rows, columns = P("data", None), P("data", "tensor")
    if how == "reshard":
        x = jax.sharding.reshard(x @ params["up"], columns)
        return jnp.einsum("bi,io->bo", jnp.tanh(x), params["down"], out_sharding=rows)
    if how == "layers":

        @jax.checkpoint
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> Any:
            h = jnp.einsum("bi,io->bo", x, w[0], out_sharding=columns)
            return x + jnp.einsum("bi,io->bo", jax.nn.gelu(h), w[1], out_sharding=rows), None

        x = jax.lax.scan(layer, x, (params["ups"], params["backs"]))[0]
    x = jnp.einsum("bi,io->bo", x, params["up"], out_sharding=columns)
    return jnp.matmul(jax.nn.relu(x), params["down"], out_sharding=rows)


def explicit_step(how: str) -> Any:
    def step(state: TrainState, batch: Any, key: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            noise = 0.1 * jax.random.normal(key, (10,))
            out = mlp(params, batch["x"] + noise, how)
            return jnp.mean((out - batch["y"]) ** 2), jnp.max(out)

        (loss, most), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "most": most}

    return step


def create_explicit(key: jax.Array) -> TrainState:
    keys = iter(jax.random.split(key, 4))
    shapes = {"up": (10, 32), "down": (32, 4), "ups": (3, 10, 16), "backs": (3, 16, 10)}
    params = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return TrainState.create(apply_fn=None, params=params, tx=TX)


SPECS = {
    "up": P(None, "tensor"), "down": P("tensor"), "ups": P(None, None, "tensor"),
    "backs": P(None, "tensor"),
}  # fmt: skip


def explicit_mesh(*types: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=types or None)


def trained(step: Any, state: TrainState, rows: Any) -> tuple[list[tuple[float, float]], Any]:
    """The results of two steps, and the parameters after them."""
    losses = []
    for i in range(2):
        state, metrics = step(state, rows, jax.random.key(i))
        losses.append((float(metrics["loss"] * 1), float(metrics["most"])))
    return losses, jax.tree.map(np.asarray, state.params)


@functools.cache
def plain_explicit(how: str) -> Any:
    """The same under plain jit, whose arguments lie as their types say."""
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        state = create_explicit(jax.random.key(0))
        named = {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()}
        params = {n: jax.device_put(x, named[n]) for n, x in state.params.items()}
        state = TrainState.create(apply_fn=None, params=params, tx=TX)
        rows = jax.device_put(batch(), NamedSharding(mesh, P("data")))
        return trained(jax.jit(explicit_step(how)), state, rows)


def under_explicit(zero: Any, mesh: Mesh, how: str) -> Any:
    step = zero(explicit_step(how))
    with jax.set_mesh(mesh):
        state = zero.init(create_explicit, jax.random.key(0))
        return trained(step, state, jax.device_put(batch(), NamedSharding(mesh, P("data"))))


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("how", "stage", "accumulation"),
    [("reshard", 3, 1), ("layers", 3, 1), ("einsum", 2, 4)],
)
def test_a_step_for_explicit_axes(how: str, stage: int, accumulation: int) -> None:
    """Under ``jax.set_mesh`` it runs as it is, and what it returns can be computed with there."""
    mesh = explicit_mesh()
    zero = zerojax.zero(
        stage=stage, mesh=mesh, specs=SPECS, stage3_param_persistence_threshold=0,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    losses, params = under_explicit(zero, mesh, how)
    want, after = plain_explicit(how)
    np.testing.assert_allclose([x for x, _ in losses], [x for x, _ in want], rtol=1e-9)
    for name, x in params.items():
        np.testing.assert_allclose(x, after[name], rtol=1e-9, atol=1e-9)
    if accumulation == 1:
        np.testing.assert_allclose(losses, want, rtol=1e-9)


def test_another_mesh_that_is_set_is_an_error() -> None:
    zero = zerojax.zero(stage=3)
    with (
        jax.set_mesh(explicit_mesh()),
        pytest.raises(ValueError, match=r"'data': 4, 'tensor': 2.*'data': 8.*mesh=mesh"),
    ):
        zero.init(create_explicit, jax.random.key(0))


def test_types_that_do_not_fit_are_jaxs_error_with_a_remedy() -> None:
    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(batch["x"] @ params["up"]) @ params["down"])

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params)), None

    mesh = explicit_mesh()
    zero = zerojax.zero(stage=1, mesh=mesh, specs=SPECS)
    with jax.set_mesh(mesh):
        state = zero.init(create_explicit, jax.random.key(0))
        with pytest.raises(Exception, match="out_sharding") as raised:
            zero(step)(state, batch())
    assert "AxisType.Auto" in raised.value.__notes__[0]


def test_a_shard_map_under_explicit_axes_is_refused() -> None:
    mesh = explicit_mesh()

    def step(state: TrainState, batch: Any) -> Any:
        mean = jax.shard_map(
            lambda x: jax.lax.pmean(jnp.mean(x), "data"), in_specs=P("data"), out_specs=P()
        )
        grads = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients(grads=grads), mean(batch["x"])

    zero = zerojax.zero(stage=1, mesh=mesh, specs=SPECS)
    with jax.set_mesh(mesh):
        state = zero.init(create_explicit, jax.random.key(0))
        with pytest.raises(NotImplementedError, match=r"shard_map.*AxisType\.Auto"):
            zero(step)(state, jax.device_put(batch(), NamedSharding(mesh, P("data"))))


def test_an_evaluation_asks_for_cuts_too() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    zero = zerojax.zero(stage=3, mesh=mesh, stage3_param_persistence_threshold=0)
    rows = np.arange(256, dtype=np.float32).reshape(16, 16) / 256

    @zero.evaluate
    def evaluate(state: TrainState, batch: jax.Array) -> jax.Array:
        out = jnp.einsum("bi,io->bo", batch, state.params["w"], out_sharding=P("data", None))
        return jnp.tanh(out).mean()

    with jax.set_mesh(mesh):
        state = zero.init(
            lambda: TrainState.create(
                apply_fn=None, params={"w": jnp.ones((16, 8))}, tx=optax.sgd(0.1)
            )
        )
        batch = jax.device_put(rows, jax.NamedSharding(mesh, P("data", None)))
        got = evaluate(state, batch)
    np.testing.assert_allclose(got, np.tanh(rows @ np.ones((16, 8))).mean(), rtol=1e-6)
