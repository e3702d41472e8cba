"""Functions of one matrix, over trees; and the calls in place of optax's orthogonalization."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from optax.contrib import MuonDimensionNumbers

import zerojax
from zerojax.graph.search import equations
from zerojax.optim.over_matrices import is_call, with_muon_calls
from zerojax.xla import jaxprs

RNG = np.random.default_rng(0)
TREE = {
    "q": RNG.normal(size=(3, 4, 6)),
    "k": RNG.normal(size=(2, 3, 4, 6)),
    "one": RNG.normal(size=(6, 4)),
}
PARAMS = {"bias": jnp.ones(4), **{name: jnp.ones(x.shape) for name, x in TREE.items()}}


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


def muon(**options: Any) -> optax.GradientTransformation:
    def numbers(tree: Any) -> Any:
        return jax.tree.map(lambda x: MuonDimensionNumbers(-2, -1) if x.ndim > 1 else None, tree)

    return optax.contrib.muon(0.05, muon_weight_dimension_numbers=numbers, **options)


@pytest.mark.parametrize(
    "tx",
    [
        muon(),
        muon(adaptive=True, preconditioning="aol"),
        muon(ns_coeffs="dion", eps=1e-6),
        muon(preconditioning="schatten", ns_steps=3),
        optax.MultiSteps(muon(), 2).gradient_transformation(),
        optax.apply_if_finite(muon(), 3),
    ],
    ids=["default", "aol", "dion", "schatten", "multi_steps", "apply_if_finite"],
)
def test_a_call_for_each_array_that_optax_orthogonalizes(tx: Any) -> None:
    """Fails where optax has renamed the function by which zerojax finds its equations, or its
    arguments; and where the calls compute other numbers."""
    before = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    after = with_muon_calls(before)
    calls = [eqn for eqn in equations(jaxprs.open_jaxpr(after)[0]) if is_call(eqn)]
    assert len(calls) == len(TREE)
    arguments = jax.tree.leaves((PARAMS, tx.init(PARAMS), PARAMS))
    assert exact.differing(jaxpr_as_fun(after), jaxpr_as_fun(before), *arguments) == []


def test_a_program_without_muon_is_unchanged() -> None:
    tx = optax.adam(0.1)
    closed = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert with_muon_calls(closed) is closed
