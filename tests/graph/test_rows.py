"""Dimensions along which rows lie: by one trace, and as two numbers of rows show them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.accumulation.flat import flatten
from zerojax.accumulation.instances import global_instance
from zerojax.accumulation.symbolic import TracedRows, growing
from zerojax.accumulation.traces import symbolic_program
from zerojax.graph.rows import RowDimensions
from zerojax.xla import jaxprs

N, T, WIDTH = 8, 6, 8  # as wide as the batch is long
SMALL: tuple[int, ...] = (N, T, WIDTH)
IMAGES = (N, 4, 4, 3)

CASES: dict[str, tuple[Callable[[jax.Array], jax.Array], tuple[int, ...], list[int]]] = {
    "transposed": (lambda x: x.T, SMALL, [2]),
    "a product": (lambda x: x @ jnp.ones((WIDTH, N)), SMALL, [0]),
    "a product over rows": (lambda x: jnp.einsum("nti,ntj->ij", x, x), SMALL, []),
    "pairs of rows": (lambda x: jnp.einsum("nti,mti->nm", x, x), SMALL, [0, 1]),
    "products of each row": (lambda x: jnp.einsum("nti,ntj->ijn", x, x), SMALL, [2]),
    "a mean over rows": (lambda x: x.mean(0), SMALL, []),
    "a mean over tokens": (lambda x: x.mean(1), SMALL, [0]),
    "tokens of all rows": (lambda x: x.reshape(N * T, WIDTH), SMALL, [0]),
    "and apart again": (lambda x: x.reshape(N * T, WIDTH).reshape(SMALL), SMALL, [0]),
    "minibatches": (lambda x: x.reshape(2, 4, T, WIDTH), SMALL, [0, 1]),
    "one of them": (lambda x: x.reshape(2, 4, T, WIDTH)[1], SMALL, [0]),
    "rows by their numbers": (lambda x: x[jnp.array([3, 1, 2])], SMALL, [0]),
    "a single row": (lambda x: x[0], SMALL, []),
    "a lookup": (lambda x: jnp.ones((N, 5))[x[..., 0].astype("int32")], SMALL, [0]),
    "an entry of each row": (
        lambda x: jnp.take_along_axis(x, x.astype("int32")[..., :1] % WIDTH, -1), SMALL, [0]
    ),
    "padded": (lambda x: jnp.pad(x, ((1, 1), (0, 0), (2, 0))), SMALL, [0]),
    "a loop over tokens": (lambda x: lax.map(jnp.sin, x.swapaxes(0, 1)), SMALL, [1]),
    "a loop over rows": (lambda x: lax.map(jnp.sin, x), SMALL, []),
    "carried": (
        lambda x: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.ones((3, WIDTH, WIDTH)))[0],
        SMALL, [0],
    ),
    "chosen": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), SMALL, [0]),
    "as long as needed": (
        lambda x: lax.while_loop(lambda c: c.sum() > 9, lambda c: c / 2, x), SMALL, [0]
    ),
    "a convolution": (
        lambda x: lax.conv_general_dilated(
            x, jnp.ones((3, 3, 3, 5)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        IMAGES, [0],
    ),
    "gradients of each row": (
        jax.vmap(
            jax.grad(lambda w, x: lax.conv_general_dilated(x[None], w, (1, 1), "SAME").sum()),
            (None, 0),
        ).__get__(jnp.ones((5, 3, 3, 3))),
        (N, 3, 4, 4), [0],
    ),
    "the rows of a scatter": (lambda x: jnp.zeros((N, 3)).at[:, 1].add(x[:, 0, 0]), SMALL, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_dimensions(name: str) -> None:
    function, shape, want = CASES[name]
    closed = jax.make_jaxpr(function)(jnp.ones(shape))
    rows = RowDimensions.of_program(closed, [0])
    assert rows.dims(jaxprs.open_jaxpr(closed)[0].outvars[0]) == want


def transformer(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        scores = jax.nn.softmax(jnp.einsum("nti,nsi->nts", x, x @ w))
        return x + jnp.tanh(jnp.einsum("nts,nsi->nti", scores, x) @ w), None

    return jnp.mean((lax.scan(jax.checkpoint(layer), x, w)[0].reshape(-1, x.shape[-1]) - 1) ** 2)


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean((y.reshape(len(x), -1) @ jnp.ones((4 * 4 * 5, 2)) - 1) ** 2)


@pytest.mark.parametrize(
    ("loss", "shape", "weights"),
    [(transformer, SMALL, (3, WIDTH, WIDTH)), (convolved, IMAGES, (3, 3, 3, 5))],
)
def test_two_numbers_of_rows_show_the_same(
    loss: Callable[..., Any], shape: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    """Each value of a gradient has rows where its size differs between the traces, apart from
    constants in the batch's shape, whose equations take no rows."""

    def traced(rows: int) -> Any:
        x, w = jnp.ones((rows, *shape[1:])), jnp.ones(weights)
        return flatten(jax.make_jaxpr(jax.grad(loss, 1))(x, w), [], [0])

    symbolic = symbolic_program(traced(N), traced(4), TracedRows(N, 4))
    flat = global_instance(symbolic, symbolic.flat)
    found, differs = RowDimensions.of_program(flat, [0, None]), []
    for one, other in zip(symbolic.flat.eqns, flat.eqns, strict=True):
        for v, w in zip(one.outvars, other.outvars, strict=True):
            if growing(v) != found.dims(w):
                differs.append(other.primitive.name)
    assert {*differs} <= {"broadcast_in_dim"}
