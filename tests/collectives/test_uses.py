"""The dtypes in which a layer needs a parameter unsharded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import zerojax
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.uses import Uses
from zerojax.xla import jaxprs

MESH = zerojax.mesh()
N = 16
F32, BF16 = "float32", "bfloat16"
X = jax.ShapeDtypeStruct((8, N), F32)
LOW = jax.ShapeDtypeStruct((8, N), BF16)


def needed(function: Callable[..., Any], x: Any, *, surely: bool = False) -> set[str]:
    w = jax.ShapeDtypeStruct((N, N), F32)
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(function)(w, x))
    uses = Uses(Gatherer(MESH, "data", keep=False), surely=surely)
    return {str(dtype) for dtype in uses.dtypes(jaxpr, jaxpr.invars[0], (None, "data"))}


@pytest.mark.parametrize("surely", [False, True])
@pytest.mark.parametrize(
    ("function", "x", "dtypes"),
    [
        (lambda w, x: x @ w, X, {F32}),
        (lambda w, x: x @ w.T.astype(BF16), LOW, {BF16}),
        (lambda w, x: x @ jax.jit(lambda w: w.astype(BF16))(w), LOW, {BF16}),
        (jax.checkpoint(lambda w, x: x @ w.astype(BF16)), LOW, {BF16}),
        (lambda w, x: x @ lax.optimization_barrier((w, x))[0].astype(BF16), LOW, {BF16}),
        (lambda w, x: x @ w.astype(BF16).astype(F32), X, {BF16}),
        (lambda w, x: x @ w.astype("int8").astype(F32), X, {F32}),
        (lambda w, x: (x @ w, x.astype(BF16) @ w.astype(BF16)), X, {F32, BF16}),
        (lambda w, x: lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0], X, {F32}),
        (lambda w, x: w * 2, X, set()),
        (lambda w, x: (w.astype(BF16), jnp.sum(w)), X, set()),
        (lambda w, x: x @ jnp.round(w), X, set()),  # gathered once it is rounded
    ],
)
def test_the_dtypes_in_which_it_is_needed(
    function: Callable[..., Any], x: Any, dtypes: set[str], surely: bool
) -> None:
    assert needed(function, x, surely=surely) == dtypes


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x @ jnp.concatenate([w, w])[:N],
        lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
        lambda w, x: lax.scan(lambda x, row: (x + jnp.cumsum(row), None), x, w),
        lambda w, x: w[jnp.int32(x[:1, 0])],
    ],
)
def test_not_surely(function: Callable[..., Any]) -> None:
    assert needed(function, X) == {F32}
    assert needed(function, X, surely=True) == set()
