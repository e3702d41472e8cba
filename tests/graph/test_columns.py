"""Which dimensions a program needs complete, and which it only reduces."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from zerojax.graph.contractions import Contraction
from zerojax.graph.dimensions import names_of
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import equations
from zerojax.xla import jaxprs

ROWS, TOKENS, WIDTH, WORDS = 4, 6, 8, 32
X = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WORDS), jnp.float32)
LABELS = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)


def stays_sharded(function: Callable[..., Any], *more: Any) -> list[bool]:
    """Whether the columns of products of ``x`` with ``w``, and their cotangents, may stay on the
    devices that have these columns of ``w``."""
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(function)(X, W, *more))
    rows = RowDimensions.of_program(jaxpr, [0, None, *(0 for _ in more)])
    dims = rows.with_weights(jaxpr, [None, 1, *(None for _ in more)])
    found = []
    for eqn in equations(jaxpr):
        if Contraction.of(eqn) is None:
            continue
        wide = [v for v in (*eqn.invars, *eqn.outvars) if v.aval.shape == (ROWS, TOKENS, WORDS)]
        found += [dims.stays_sharded(v, 2) for v in wide]
    return found


def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def rematerialised(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.checkpoint(loss)(x, w, labels)


@pytest.mark.parametrize("function", [loss, jax.grad(loss, (0, 1)), jax.grad(rematerialised)])
def test_a_loss_reduces_the_words(function: Callable[..., Any]) -> None:
    found = stays_sharded(function, LABELS)
    assert found
    assert all(found)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w,  # the logits are a result
        lambda x, w: jnp.sort(x @ w).sum(),
        lambda x, w: jnp.cumsum(x @ w, -1).sum(),
        lambda x, w: ((x @ w).reshape(ROWS, TOKENS, 4, -1).max(2)).sum(),
        lambda x, w: (x @ w)[..., 1:].sum(),
        lambda x, w: jnp.tanh(x @ w) @ jnp.ones((WORDS, 3)),  # another weight, which is gathered
    ],
)
def test_other_uses_need_all_words(function: Callable[..., Any]) -> None:
    assert not stays_sharded(function)[0]


def test_entries_of_a_scan_have_one_dimension_less() -> None:
    def products(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.scan(lambda c, row: (c, (row @ w).max(-1)), 0.0, jnp.moveaxis(x, 1, 0))[1]

    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(products)(X, W))
    dims = RowDimensions.of_program(jaxpr, [0, None]).with_weights(jaxpr, [None, 1])
    (product,) = (eqn for eqn in equations(jaxpr) if Contraction.of(eqn) is not None)
    assert dims.stays_sharded(product.outvars[0], 1)


@pytest.mark.parametrize(
    ("function", "shapes", "names"),
    [
        (lambda x: x.T, [(2, 3)], [(0, 1), (1, 0)]),
        (lambda x: x[:, None], [(2, 3)], [(0, 2), (0, 1, 2)]),
        (lambda x: x.reshape(6, 4), [(2, 3, 4)], [(None, None, 2), (None, 2)]),
        (lambda x: x[:, :2], [(2, 3)], [(0, None), (0, None)]),
        (lambda x: jnp.max(x, 0), [(2, 3)], [(0, 1), (1,)]),
        (jnp.matmul, [(2, 3), (3, 4)], [(0, 1), (1, 3), (0, 3)]),
        (
            lambda x: jax.lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]),
            [(2, 3)],
            [(None, 1), (), (None, 1)],
        ),
        (jnp.sin, [(2, 3)], [(0, 1), (0, 1)]),
        (jnp.sort, [(2, 3)], None),
    ],
)
def test_dimensions_have_names(function: Callable[..., Any], shapes: Any, names: Any) -> None:
    traced = jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes))
    found = names_of(jaxprs.without_calls(traced).eqns[-1])
    assert found == names if names is None else [tuple(x) for x in found] == names
