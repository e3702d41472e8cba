"""Which gradients are added up before they are reduced."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxprs import Spec, abstract

import zerojax
from zerojax.collectives import gradients, target_specs
from zerojax.graph.rows import RowDimensions

MESH = zerojax.mesh()
SPEC: Spec = ("data", None)


def sums(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    batch: Collection[int] = (1,),
    of_layer: bool = False,
) -> tuple[int, int]:
    """How many sums are reduced, and how many products go into them; ``batch`` has the positions of
    the arguments with rows."""
    jaxpr = jax.make_jaxpr(function)(*abstract(*shapes)).jaxpr
    outs = [SPEC if v.aval.shape[0] > 1 else None for v in jaxpr.outvars]
    wants = target_specs.trace_back(jaxpr, outs, MESH)
    dims = [0 if i in batch else None for i in range(len(shapes))]
    rows = RowDimensions.of_program(jaxpr, dims)
    found = gradients.find_sums(jaxpr, wants, MESH, rows, of_layer=of_layer)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return len(found.reduced), sum(e.outvars[0] in found.added for e in products)


def twice(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T))


def test_two_uses_of_a_matrix_are_reduced_once() -> None:
    assert sums(jax.grad(twice), (16, 8), (4, 16)) == (1, 2)


def test_a_use_on_other_rows_is_not_added_before() -> None:
    """A table of positions that passes through a matrix too is no part of the batch."""

    def scores(w: jax.Array, x: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh((x @ w) @ (table @ w).T))

    assert sums(jax.grad(scores), (16, 8), (4, 16), (5, 16)) == (0, 0)
    assert sums(jax.grad(scores), (16, 8), (4, 16), (4, 16)) == (0, 0)  # of as many positions


def test_a_padded_gradient_is_reduced_where_it_is_made() -> None:
    assert sums(jax.grad(twice), (17, 8), (4, 17)) == (0, 0)


@pytest.mark.parametrize(("towers", "found"), [(1, (1, 2)), (3, (0, 0))])
def test_few_gradients_wait_for_others_that_are_made_far_apart(
    towers: int, found: tuple[int, int]
) -> None:
    """A deep model that is run on two inputs would have all its gradients unsharded; a layer in a
    loop has no more than its own."""

    def tower(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x @ w
            for _ in range(gradients.NEAR):
                x = jnp.tanh(x)
        return jnp.sum(x)

    def both(*args: Any) -> Any:
        *ws, x, y = args
        return tower(ws, x) + tower(ws, y)

    grads = jax.grad(both, argnums=tuple(range(towers)))
    shapes, batch = [*[(16, 16)] * towers, (4, 16), (4, 16)], (towers, towers + 1)
    assert sums(grads, *shapes, batch=batch) == found
    assert sums(grads, *shapes, batch=batch, of_layer=True) == (towers, 2 * towers)
