"""Scans take the operands of broadcasts in place of their results, with the same numbers."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.graph.search import equations
from zerojax.trace.broadcasts import with_broadcasts_in_loops
from zerojax.xla import jaxprs

SHAPE = (3, 4, 4)
X, W = jnp.arange(48.0).reshape(SHAPE), jnp.arange(20.0).reshape(5, 4)
Function = Callable[[jax.Array, jax.Array], Any]


def masked(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        seen = jnp.tril(jnp.ones(SHAPE[1:], bool))
        return jnp.where(seen, jnp.sin(x) * w, -9.0), None

    return lax.scan(layer, x, w)[0].sum()


def in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    def iteration(i: int, x: jax.Array) -> jax.Array:
        return jnp.cos(jax.grad(masked)(x, w))

    return lax.fori_loop(0, 2, iteration, x)


def column(x: jax.Array, w: jax.Array) -> jax.Array:
    spread = jnp.broadcast_to(w[0], SHAPE)
    return lax.scan(lambda x, w: (x * spread + w, None), x, w)[0]


def in_a_call(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.jit(column)(x, w)


@pytest.mark.parametrize("function", [jax.grad(masked), in_a_loop, column, in_a_call])
def test_scans_broadcast_their_constants(function: Function) -> None:
    before = jax.make_jaxpr(function)(X, W)
    after = with_broadcasts_in_loops(before)
    assert full_constants(before) > full_constants(after) == 0
    assert exact.differing(jaxpr_as_fun(after), jaxpr_as_fun(before), X, W) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: lax.scan(lambda c, w: (c * x + w, None), x, w)[0],  # not a broadcast
        lambda x, w: lax.scan(lambda c, _: (c * x[:1], None), jnp.zeros(SHAPE), w)[0],  # a carry
        lambda x, w: jnp.broadcast_to(w[0], SHAPE) * x,
    ],
)
def test_unchanged(function: Function) -> None:
    before = jax.make_jaxpr(function)(X, W)
    assert with_broadcasts_in_loops(before) is before


def full_constants(closed: Any) -> int:
    """Returns the number of constants of scans that are as large as ``X``."""
    return sum(
        v.aval.shape == SHAPE
        for eqn in equations(jaxprs.open_jaxpr(closed)[0])
        if eqn.primitive.name == "scan"
        for v in eqn.invars[: jaxprs.scan_parts(eqn).consts]
    )
