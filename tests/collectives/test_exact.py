"""The evaluation of ``tests/exact.py`` tells programs apart."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

X = np.random.default_rng(0).integers(0, 50, (6, 5)).astype(np.float32)
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


@pytest.mark.parametrize("name", OTHERS)
def test_another_program(name: str) -> None:
    assert exact.differing(*OTHERS[name], X) == [0]
