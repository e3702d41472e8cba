"""A gradient from which another one is made goes on as a shard."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxprs import Spec, abstract, gathers, scatters

import zerojax
from zerojax.collectives import Inserter, Shard, reuse
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
    goes_on = reuse.GoesOn(jaxpr, [Shard(W, SPEC), X], "data")
    assert goes_on.gradients == {}
    assert goes_on.used_whole != set()


def test_an_activation_of_a_parameters_shape_is_no_gradient() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T)))(x) @ w

    closed = jax.make_jaxpr(step)(*abstract((N, N), (N, N)))
    goes_on = reuse.GoesOn(closed.jaxpr, [Shard(W, ("data", None)), X], "data")
    assert goes_on.gradients == {}
