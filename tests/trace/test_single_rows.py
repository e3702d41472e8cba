"""Small products of one row compute two rows, and have the same numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.graph.search import equations
from zerojax.trace.single_rows import SmallProducts, with_repeated_rows

SMALL = SmallProducts(devices=2, elements=100, columns=9)


def random(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("btd,df->btf", x, matrix)


def heads(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("bthd,hdf->btf", x, matrix)


def matrix_on_the_left(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(matrix, x, (((0,), (2,)), ((), ())))


def in_a_loop(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.scan(lambda x, _: (jax.jit(product)(x, matrix), None), x, length=2)[0]


def products_of(closed: Any) -> list[tuple[int, ...]]:
    found = equations(closed.jaxpr)
    return [e.outvars[0].aval.shape for e in found if e.primitive.name == "dot_general"]


@pytest.mark.parametrize(
    ("function", "x", "matrix", "shape"),
    [
        (product, random(1, 1, 4), random(4, 8), (1, 2, 8)),
        (product, random(2, 1, 4), random(4, 8), (2, 2, 8)),  # one row on each device
        (heads, random(1, 1, 2, 4), random(2, 4, 8), (1, 2, 8)),
        (matrix_on_the_left, random(1, 1, 4), random(4, 8), (8, 1, 2)),
        (in_a_loop, random(1, 1, 4), random(4, 4), (1, 2, 4)),
    ],
)
def test_two_rows_have_the_same_numbers(
    function: Callable[..., jax.Array], x: jax.Array, matrix: jax.Array, shape: tuple[int, ...]
) -> None:
    closed = jax.make_jaxpr(function)(x, matrix)
    new = with_repeated_rows(closed, SMALL)
    assert products_of(new) == [shape]
    (result,) = jaxpr_as_fun(new)(x, matrix)
    expected = function(x, matrix)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(result.astype("f4"), expected.astype("f4"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("x", "matrix"),
    [
        (random(1, 3, 4), random(4, 8)),
        (random(4, 1, 4), random(4, 8)),
        (random(1, 1, 4), random(4, 9)),
        (random(1, 1, 16), random(16, 8)),
        (random(1, 1, 4), random(4, 1)),
        (random(1, 1, 4, dtype=jnp.float32), random(4, 8, dtype=jnp.float32)),
    ],
    ids=["rows", "each", "columns", "elements", "vectors", "float32"],
)
def test_other_products_are_left(x: jax.Array, matrix: jax.Array) -> None:
    closed = jax.make_jaxpr(product)(x, matrix)
    assert str(with_repeated_rows(closed, SMALL)) == str(closed)
