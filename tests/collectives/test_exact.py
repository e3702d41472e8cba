"""The evaluation of ``tests/exact.py`` agrees with jax, and tells programs apart."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

X = np.random.default_rng(0).integers(0, 50, (6, 5)).astype(np.float32)
AT = np.array([3, 0, 4, -2, 1, 3], np.int32)
# On whole numbers they are exact in float32 too.
AS_IN_JAX: dict[str, Callable[[Any], Any]] = {
    "along": lambda x: jnp.take_along_axis(x, AT[:, None], -1),
    "along, transposed": jax.grad(lambda x: (jnp.take_along_axis(x, AT[:, None], -1) ** 2).sum()),
    "rows": jax.grad(lambda x: (x[AT] ** 2).sum()),
    "columns": lambda x: x[:, AT[:2]],
    "by row": jax.grad(lambda x: (jax.vmap(lambda row, i: row[i])(x, AT) ** 2).sum()),
    "clipped": lambda x: jnp.take(x, jnp.array([9, -3]), axis=0, mode="clip"),
    "dropped": lambda x: x.at[jnp.array([7, 2])].add(1.0, mode="drop"),
    "put": lambda x: x.at[AT[0]].set(2.0),
    "slices": lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (3, 0), (2, 5)), (5, 0)),
    "padded": lambda x: lax.pad(x, 0.0, ((1, 2, 1), (-1, 0, 0))),
    "summed up": lambda x: lax.cumsum(x, 1, reverse=True) + x.sum(),
    "products": lambda x: jnp.einsum("abc,abd->acd", x.reshape(2, 3, 5), x.reshape(2, 3, 5)),
    "a loop": lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x, reverse=True),
    "reversed": lambda x: x[::-1, 1::2] / 2,
}
SAME: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "another order": (lambda x: x.sum(), lambda x: x[::2].sum() + x[1::2].sum()),
    "a loop": (
        lambda x: lax.fori_loop(0, 2, lambda i, y: y @ x[:5], x), lambda x: x @ x[:5] @ x[:5],
    ),
    "a mean of means": (lambda x: x.mean(), lambda x: x.reshape(2, 15).mean(1).mean()),
    "a barrier": (jnp.tanh, lambda x: jnp.tanh(lax.optimization_barrier(x))),
    "rounded twice": (
        lambda x: x.astype("bfloat16"),
        lambda x: x.astype("bfloat16").astype("float32").astype("bfloat16"),
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a term left out": (lambda x: x.sum(0), lambda x: x[:-1].sum(0)),
    "another operand": (lambda x: x[:5] @ x[1:].T, lambda x: x[:5] @ x[:5].T),
    "another function": (jnp.tanh, jnp.sin),
    "a rounding": (lambda x: x * 2, lambda x: x.astype("bfloat16").astype("float32") * 2),
    "a rounding later": (lambda x: (x * x).astype("bfloat16"), lambda x: x.astype("bfloat16") ** 2),
    "a branch": (
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.tan, x),
    ),
    "a bound": (lambda x: jnp.maximum(x, 0.0), lambda x: x),
    "noise": (
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
        lambda x: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
    ),
}


@pytest.mark.parametrize("name", AS_IN_JAX)
def test_as_in_jax(name: str) -> None:
    function = AS_IN_JAX[name]
    got = exact.run(jax.make_jaxpr(function)(X), [exact.lift(X)])
    for a, b in zip(got, jax.tree.leaves(function(jnp.asarray(X))), strict=True):
        np.testing.assert_array_equal(a, exact.lift(np.asarray(b)))


@pytest.mark.parametrize("name", SAME)
def test_the_same(name: str) -> None:
    assert exact.differing(*SAME[name], X) == []


@pytest.mark.parametrize("name", OTHERS)
def test_another_program(name: str) -> None:
    assert exact.differing(*OTHERS[name], X) == [0]
