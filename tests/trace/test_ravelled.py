"""Sums over reshaped arrays become sums over the arrays, of the same terms."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.graph.search import equations
from zerojax.trace.ravelled import without_ravels

A, B, CUBE = (
    np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for shape in ((4, 6), (4, 6), (2, 3, 4))
)

Function = Callable[[Any, Any], Any]


def in_scan(a: Any, b: Any) -> Any:
    return lax.scan(lambda c, x: (c + jnp.vdot(a, x * b), c), 0.0, CUBE[0, 0])[0]


def in_while(a: Any, b: Any) -> Any:
    def update(carry: Any) -> Any:
        return carry[0] + 1, carry[1] + jnp.vdot(a, b)

    def goes_on(carry: Any) -> Any:
        return carry[0] + 0 * a.ravel().sum() < 3

    return lax.while_loop(goes_on, update, (0.0, 0.0))[1]


def in_cond(a: Any, b: Any) -> Any:
    return lax.cond(a[0, 0] > 0, jnp.vdot, lambda a, b: b.ravel().sum(), a, b)


def in_calls(a: Any, b: Any) -> Any:
    return jax.jit(jax.checkpoint(jnp.vdot))(a, b) + jax.jit(jnp.vdot)(b, a)


def used_twice(a: Any, b: Any) -> Any:
    """The dot product leaves ``b`` in its shape; another use needs a vector."""
    vector = a.ravel()
    return jnp.vdot(vector, b) + vector[3]


def in_nested_calls(a: Any, b: Any) -> Any:
    """Vectors are operands of a call and of a call inside it."""
    return jax.jit(lambda x, y: jnp.linalg.norm(x) + jax.jit(jnp.dot)(x, y))(a.ravel(), b.ravel())


def computed_twice(a: Any, b: Any) -> Any:
    """A computed vector is needed for a dot product and by itself."""
    vector = 2 * a.ravel()
    return jnp.vdot(vector, b) + vector[3]


# A function, and the number of vectors that it keeps.
REWRITTEN: list[tuple[Function, int]] = [
    (lambda a, b: jnp.vdot(a, b, precision="highest"), 0),
    (lambda a, b: jnp.vdot(a.astype(jnp.bfloat16), b, preferred_element_type=jnp.float32), 0),
    (lambda a, b: jnp.vdot(a, a) + jnp.vdot(CUBE, 2 * CUBE), 0),
    (lambda a, b: jnp.vdot(a[:2], b[2:]), 0),
    (lambda a, b: jnp.vdot(a.T, b.T), 0),
    (lambda a, b: a.reshape(-1).sum() + b.ravel().min() + CUBE.size, 0),
    (lambda a, b: jnp.linalg.norm(a.ravel()), 0),
    (lambda a, b: jnp.linalg.norm(a.ravel(), ord=1) + jnp.linalg.norm(CUBE.ravel()), 0),
    (lambda a, b: jnp.sum(a.ravel() * b.ravel()), 0),
    (lambda a, b: jnp.sum((jnp.abs(a.ravel()) * b[0, 0] + b.ravel() / 3) ** 3), 0),
    (lambda a, b: jnp.sum(lax.select(a.ravel() > 0, b.ravel(), lax.broadcast(b[0, 0], (24,)))), 0),
    (lambda a, b: jnp.vdot(a.ravel() * 2, b) + jnp.max(jnp.exp(a.ravel())), 0),
    (in_nested_calls, 0),
    (computed_twice, 1),
    (in_scan, 0),
    (in_while, 0),
    (in_cond, 0),
    (in_calls, 0),
    (used_twice, 1),
]


@pytest.mark.parametrize(("function", "kept"), REWRITTEN)
def test_rewritten(function: Function, kept: int) -> None:
    before = jax.make_jaxpr(function)(A, B)
    after = without_ravels(before)
    assert reshapes(before) > reshapes(after) == kept
    assert exact.differing(jaxpr_as_fun(after), jaxpr_as_fun(before), A, B) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: jnp.vdot(a, b.T),  # other pairs of elements than in their own shapes
        lambda a, b: jnp.vdot(a, jnp.arange(24.0)),
        lambda a, b: jnp.argmax(a.ravel()),
        lambda a, b: jnp.sum(a.ravel() * b.T.ravel() + jnp.arange(24.0)),
        lambda a, b: jnp.sum(jnp.cumsum(a.ravel())),
        lambda a, b: jax.jit(jnp.sort)(a.ravel()).sum(),
        lambda a, b: jnp.sum(a.reshape(3, 8)) + jnp.sum(a[0]),
        lambda a, b: jnp.outer(a, b),
        lambda a, b: lax.reshape(a, (24,), (1, 0)).sum(),
    ],
)
def test_unchanged(function: Function) -> None:
    before = jax.make_jaxpr(function)(A, B)
    assert without_ravels(before) is before


def reshapes(closed: Any) -> int:
    """Counts the equations that reshape an array."""
    return sum(each.primitive.name == "reshape" for each in equations(closed.jaxpr))
