"""What rematerialised blocks keep, found and sent to host memory until the backward pass."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations

import zerojax
from zerojax.collectives import Inserter, residuals
from zerojax.collectives.gathering import Thresholds
from zerojax.xla import jaxprs

MESH = zerojax.mesh()
N, LAYERS = 16, 4
W = np.random.default_rng(0).normal(size=(LAYERS, N, N)).astype("float32") / 4
X = np.random.default_rng(1).normal(size=(8, N)).astype("float32")


def block(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def scanned(ws: Any, x: Any) -> Any:
    layer = jax.checkpoint(block, prevent_cse=False)
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x @ ws[0], ws)[0])


def unrolled(ws: Any, x: Any) -> Any:
    x = x @ ws[0]
    for w in ws:
        x = jax.checkpoint(block)(x, w)
    return jnp.sum(x)


def in_a_call(ws: Any, x: Any) -> Any:
    return jax.jit(jax.value_and_grad(scanned))(ws, x)


def read_in_a_call(ws: Any, x: Any) -> Any:
    value, back = jax.vjp(lambda ws: scanned(ws, x), ws)
    return jax.jit(lambda back, seed: back(seed))(back, jnp.ones_like(value))


def jaxpr_of(function: Callable[..., Any]) -> Any:
    return jaxprs.open_jaxpr(jax.make_jaxpr(jax.value_and_grad(function))(W, X))[0]


def inserted(function: Callable[..., Any], away: int | None) -> Callable[..., Any]:
    inserter = Inserter(MESH, "data", keep=False, thresholds=Thresholds(away=away))

    def run(ws: Any, x: Any) -> Any:
        return inserter(jax.make_jaxpr(jax.value_and_grad(function))(ws, x), [ws, x])

    return run


def to_host(jaxpr: Any) -> list[tuple[int, ...]]:
    return [
        v.aval.shape
        for _, eqn in equations(jaxpr)
        if eqn.primitive.name == "device_put"
        for v, to in zip(eqn.outvars, jaxprs.param(eqn, "devices"), strict=True)
        if to == jax.memory.Space.Host
    ]


def test_a_loop_leaves_one_stack() -> None:
    (v,) = residuals.find_leaving(jaxpr_of(scanned), 1)
    assert v.aval.shape == (LAYERS, 8, N)


@pytest.mark.parametrize("function", [in_a_call, read_in_a_call])
def test_calls_are_entered(function: Callable[..., Any]) -> None:
    inserter = Inserter(MESH, "data", keep=False, thresholds=Thresholds(away=1))

    def run(ws: Any, x: Any) -> Any:
        return inserter(jax.make_jaxpr(function)(ws, x), [ws, x])

    assert to_host(jax.make_jaxpr(run)(W, X)) == [(8, N)]
    assert exact.differing(lambda ws, x: run(ws, x)[-1], jax.grad(scanned), W, X) == []


def test_small_ones_stay() -> None:
    assert residuals.find_leaving(jaxpr_of(scanned), 8 * N)
    assert not residuals.find_leaving(jaxpr_of(scanned), 8 * N + 1)


def test_what_is_used_elsewhere_stays() -> None:
    def kept(ws: Any, x: Any) -> Any:
        value, back = jax.vjp(lambda ws: scanned(ws, x), ws)
        return back(jnp.ones_like(value)), jax.tree.leaves(back)

    assert not residuals.find_leaving(jaxprs.open_jaxpr(jax.make_jaxpr(kept)(W, X))[0], 1)


def without_checkpoint(ws: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda x, w: (block(x, w), None), x @ ws[0], ws)[0])


@pytest.mark.parametrize("function", [unrolled, without_checkpoint])
def test_without_blocks_in_a_loop_nothing_leaves(function: Callable[..., Any]) -> None:
    assert not residuals.find_leaving(jaxpr_of(function), 1)


@pytest.mark.parametrize(
    ("function", "outside"), [(unrolled, True), (scanned, False), (without_checkpoint, False)]
)
def test_blocks_outside_loops(function: Callable[..., Any], outside: bool) -> None:
    assert residuals.some_stay(jaxpr_of(function)) is outside
    jitted = jaxpr_of(lambda ws, x: jax.jit(function)(ws, x))
    assert residuals.some_stay(jitted) is outside


def test_sent_where_made() -> None:
    assert to_host(jax.make_jaxpr(inserted(scanned, 1))(W, X)) == [(8, N)]
    assert exact.differing(inserted(scanned, 1), jax.value_and_grad(scanned), W, X) == []
    assert to_host(jax.make_jaxpr(inserted(scanned, None))(W, X)) == []
