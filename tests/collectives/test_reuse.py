"""A gradient from which another one is made goes on as a shard."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name
from jaxprs import Spec, abstract, gathers, scatters
from swept import swept

import zerojax
from zerojax.collectives import Inserter, Shard, reuse
from zerojax.hlo.traffic import collectives
from zerojax.trace.marks import GRADIENT

MESH = zerojax.mesh()
N, M = 128, 256  # more elements than are gathered together
W = np.random.default_rng(0).normal(size=(N, M)) / N
X = np.random.default_rng(1).normal(size=(16, N))
SPEC: Spec = (None, "data")


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)


grad = jax.grad(loss)


def hessian_vector(w: Any, x: Any) -> Any:
    g = grad(w, x)
    _, curved = jax.jvp(lambda w: grad(w, x), (w,), (g,))
    return checkpoint_name(g + 0.1 * curved, GRADIENT)


def sharpness(w: Any, x: Any) -> Any:
    g = grad(w, x)
    return checkpoint_name(grad(w + 0.1 * g / jnp.linalg.norm(g), x), GRADIENT)


def penalty(w: Any, x: Any) -> Any:
    made = jax.grad(lambda w: loss(w, x) + jnp.sum(grad(w, x) ** 2))(w)
    return checkpoint_name(made, GRADIENT)


STEPS = {"hessian_vector": hessian_vector, "sharpness": sharpness, "penalty": penalty}


def inserted(step: Callable[..., Any]) -> Callable[..., Any]:
    inserter = Inserter(MESH, "data", keep=False)

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(step)(w, x)
        placed = inserter.constrain(w, SPEC)
        return inserter(closed, [Shard(placed, SPEC), x], want=[SPEC])[0]

    return run


@pytest.mark.parametrize("name", STEPS)
def test_what_is_inserted_is_an_identity(name: str) -> None:
    assert exact.differing(inserted(STEPS[name]), STEPS[name], W, X) == []


@pytest.mark.parametrize("name", swept(STEPS))
def test_same_gradient(name: str) -> None:
    with jax.enable_x64(True):
        want = jax.jit(STEPS[name])(W, X)
        got = jax.jit(inserted(STEPS[name]))(W, X)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_every_gradient_is_scattered_and_gathered_where_used(name: str) -> None:
    jaxpr = jax.make_jaxpr(inserted(STEPS[name]))(W, X)
    assert {*(move.shape for move in scatters(jaxpr))} <= {(N, M), (M, N)}
    assert {*(move.shape for move in gathers(jaxpr))} <= {(N, M), (M, N)}
    assert len(scatters(jaxpr)) == 2  # the two uses of the matrix are added up before


def test_a_gradient_for_the_optimizer_alone_stays_as_it_was() -> None:
    def step(w: Any, x: Any) -> Any:
        g = checkpoint_name(grad(w, x), GRADIENT)
        return g @ g.T  # as in Muon

    jaxpr = jax.make_jaxpr(step)(*abstract((N, M), (16, N))).jaxpr
    goes_on = reuse.ReusedGradients(jaxpr, [Shard(W, SPEC), X], "data")
    assert goes_on.gradients == {}
    assert goes_on.used_unsharded != set()


def test_an_activation_of_a_parameters_shape_is_no_gradient() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T)))(x) @ w

    closed = jax.make_jaxpr(step)(*abstract((N, N), (N, N)))
    goes_on = reuse.ReusedGradients(closed.jaxpr, [Shard(W, ("data", None)), X], "data")
    assert goes_on.gradients == {}


def test_a_call_may_return_a_constant() -> None:
    def step(w: Any, x: Any) -> Any:
        g, one = jax.jit(lambda w, x: (grad(w, x), 1.0))(w, x)
        return g * one

    jaxpr = jax.make_jaxpr(step)(*abstract((N, M), (16, N))).jaxpr
    assert reuse.ReusedGradients(jaxpr, [Shard(W, SPEC), X], "data").gradients == {}


LAYERS, WIDTH = 3, 512


def deep(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def lowered(gradient: Callable[[Any, Any], Any]) -> jax.stages.Lowered:
    mesh = zerojax.topology("h100", 8)
    zero = zerojax.zero(stage=3, bf16=True, mesh=mesh)

    def create() -> TrainState:
        params = [jnp.zeros((WIDTH, WIDTH))] * LAYERS
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    @zero
    def step(state: TrainState, x: jax.Array) -> TrainState:
        grads = gradient(state.params, x.astype(state.params[0].dtype))
        return state.apply_gradients(grads=grads)

    return step.lower(zero.abstract_state(create), jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32))


def deep_hessian(params: Any, x: Any) -> Any:
    g = jax.grad(deep)(params, x)
    _, curved = jax.jvp(lambda p: jax.grad(deep)(p, x), (params,), (g,))
    return jax.tree.map(lambda g, c: g + 0.1 * c, g, curved)


def deep_penalty(params: Any, x: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        value, grads = jax.value_and_grad(deep)(params, x)
        return value + optax.tree.norm(grads, squared=True)

    return jax.grad(loss)(params)


def deep_twice(params: Any, x: Any) -> Any:
    """Of two towers side by side with the same parameters."""

    def loss(params: Any) -> jax.Array:
        one, two = x, 1 - x
        for w in params:
            one, two = one + jnp.tanh(one @ w), two + jnp.tanh(two @ w)
        return jnp.mean(jnp.square((one * two).astype(jnp.float32)))

    return jax.grad(loss)(params)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(
    ("gradient", "gathers", "scatters"),
    [
        # Backward each tower gathers; their gradients are added up, and reduced once.
        (deep_twice, LAYERS + 2 * (LAYERS - 1), LAYERS),
        # Forward and backward, both again with the gradient beside the parameters; the first
        # layer's input has no cotangent. Two gradients.
        (deep_hessian, 3 * LAYERS + 3 * (LAYERS - 1), 2 * LAYERS),
        # Forward and backward, both differentiated, the latter with the gradient too. The first
        # gradient, and parts of the other one that are made far apart.
        (deep_penalty, 2 * LAYERS + 3 * (LAYERS - 1), 3 * LAYERS - 1),
    ],
)
def test_what_is_sent_is_the_theory(
    gradient: Callable[..., Any], gathers: int, scatters: int
) -> None:
    compiled: Any = lowered(gradient).compile()
    units: dict[str, float] = {}
    for each in collectives(compiled.as_text()):
        share = each.times * each.payload_bytes / (2 * WIDTH * WIDTH)
        units[each.kind] = units.get(each.kind, 0) + share
    assert units.pop("all-gather") == pytest.approx(gathers, rel=0.05)
    assert units.pop("reduce-scatter") == pytest.approx(scatters, rel=0.05)
    assert sum(units.values()) < 0.05
