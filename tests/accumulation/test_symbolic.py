"""Programs on symbolic rows: what grows with them, and their instances."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.accumulation.flat import Flat, flatten
from zerojax.accumulation.instances import global_instance, instance
from zerojax.accumulation.symbolic import Symbolic, TracedRows, UnevenError, growing
from zerojax.accumulation.traces import symbolic_program
from zerojax.xla import jaxprs

W = np.ones((8, 8), np.float32)  # as wide as the batch is long

FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "as wide as long": lambda x: jnp.tanh(x @ W) @ W,
    "a mean": lambda x: x.mean(0),
    "rows in a loop": lambda x: lax.scan(lambda c, w: (jnp.sin(c @ w), c), x, jnp.stack([W] * 8)),
    "a loop over rows": lambda x: lax.map(jnp.sort, x),
    "as often as there are rows": lambda x: lax.fori_loop(0, len(x), lambda i, c: c * i, 1),
    "numbers of rows in a loop": lambda x: lax.scan(
        lambda c, w: (c / len(x) + (x @ w).sum(), None), 0.0, jnp.stack([W] * 8)
    )[0],
    "arrays of numpy": lambda x: x[np.arange(len(x)), 0] * np.ones(len(x), np.float32),
    "merged": lambda x: x.reshape(len(x) // 2, -1).T[:, ::-1],
}


def traced(function: Callable[[jax.Array], Any], rows: int) -> Flat:
    return flatten(jax.make_jaxpr(function)(jnp.ones((rows, 8), jnp.float32)), [], [0])


def symbolic(function: Callable[[jax.Array], Any], one: int = 8, two: int = 4) -> Symbolic:
    return symbolic_program(traced(function, one), traced(function, two), TracedRows(one, two))


def text(program: Flat) -> list[str]:
    """Its equations, without the variables."""
    return [
        f"{[str(v.aval) for v in eqn.outvars]} = {eqn.primitive} {eqn.params} "
        f"{[getattr(v, 'val', v.aval) for v in eqn.invars]}"
        for eqn in program.eqns
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_instances_are_the_traces(name: str) -> None:
    program = symbolic(FUNCTIONS[name])
    own = {*program.numbers, *(v for eqn in program.flat.eqns for v in eqn.outvars)}
    assert text(global_instance(program, program.flat)) == text(traced(FUNCTIONS[name], 8))
    on_few = instance(program, program.flat, 4, frozenset(own))
    if name != "numbers of rows in a loop":  # that of a loop is named by the analysis of the loop
        assert text(on_few) == text(traced(FUNCTIONS[name], 4))


def test_only_the_batch_grows() -> None:
    flat = symbolic(FUNCTIONS["as wide as long"]).flat
    assert [growing(v) for v in flat.invars] == [[0]]
    assert {tuple(growing(v)) for eqn in flat.eqns for v in eqn.outvars} == {(0,), ()}


def test_a_mean_over_some_rows_is_their_share() -> None:
    program = symbolic(lambda x: x.mean(0))
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for rows in (1, 2, 4):  # of which one is traced
        share = instance(program, program.flat, rows, frozenset())
        parts = [jaxprs.evaluate(share, [x[i : i + rows]])[0] for i in range(0, 8, rows)]
        np.testing.assert_allclose(sum(parts), x.mean(0))
        own = instance(program, program.flat, rows, frozenset(program.numbers))
        np.testing.assert_allclose(jaxprs.evaluate(own, [x[:rows]])[0], x[:rows].mean(0))


def test_a_number_that_is_not_known() -> None:
    program = symbolic(lambda x: x.sum(0) / (len(x) - 1) ** 2)
    with pytest.raises(UnevenError, match=r"div at test_symbolic\.py") as number:
        instance(program, program.flat, 2, frozenset(program.numbers))
    assert "is 49 with 8 rows, 9 with 4, and unknown with 2" in number.value.contrast
    halves = symbolic(lambda x: x.reshape(len(x) // 2, -1))
    with pytest.raises(UnevenError, match=r"reshape at test_symbolic\.py") as half:
        instance(halves, halves.flat, 1, frozenset())
    assert half.value.contrast == " with 4 elements for 8 rows"
