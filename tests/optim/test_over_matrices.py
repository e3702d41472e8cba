"""Functions of one matrix, over trees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax

RNG = np.random.default_rng(0)
TREE = {
    "q": RNG.normal(size=(3, 4, 6)),
    "k": RNG.normal(size=(2, 3, 4, 6)),
    "one": RNG.normal(size=(6, 4)),
}


def test_each_matrix() -> None:
    scale = jnp.float32(2.0)
    got = jax.jit(zerojax.over_matrices(lambda m: (scale * m @ m.T @ m).astype(jnp.bfloat16)))(TREE)
    for name, x in TREE.items():
        assert got[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(got[name], 2 * x @ x.swapaxes(-1, -2) @ x, rtol=1e-2, atol=0.05)


@pytest.mark.parametrize(
    ("fn", "tree", "words"),
    [
        (lambda m: m, {"bias": jnp.ones(3)}, r"\['bias'\] has shape \(3,\), not \[..., m, n\]"),
        (
            lambda m: m @ m.T,
            [jnp.ones((2, 3, 4))],
            r"returns \(3, 3\) for the matrix \[0\] of \(3, 4\)",
        ),
    ],
    ids=["vector", "other shape"],
)
def test_what_is_no_matrix(fn: Callable[..., Any], tree: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zerojax.over_matrices(fn)(tree)
