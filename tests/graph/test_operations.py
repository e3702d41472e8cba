"""A program as operations: calls written out, runs counted, what is used."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.graph.operations import Program


def program(function: Callable[..., Any], *args: Any) -> Program:
    return Program(jax.make_jaxpr(function)(*args))


def times(found: Program, name: str) -> list[int]:
    """The runs of the operations of a primitive, those that are used."""
    live = found.live()
    return [
        op.times
        for i, op in enumerate(found.operations)
        if i in live and op.eqn.primitive.name == name
    ]


def test_calls_are_written_out() -> None:
    called = jax.jit(jnp.sin)
    found = program(lambda x: jax.checkpoint(called)(called(x)), 1.0)
    assert times(found, "sin") == [1, 1]


def test_loops_multiply() -> None:
    def inner(x: Any, _: Any) -> Any:
        return jnp.sin(x), None

    def outer(x: Any, _: Any) -> Any:
        return lax.scan(inner, jnp.cos(x), length=3)[0], None

    found = program(lambda x: lax.scan(outer, x, length=5)[0], 1.0)
    assert (times(found, "cos"), times(found, "sin")) == ([5], [15])
    assert all(op.exact for op in found.operations)


def test_a_loop_of_unknown_length_counts_once() -> None:
    found = program(lambda x: lax.while_loop(lambda y: y < 9.0, jnp.exp, x), 1.0)
    (op,) = [op for op in found.operations if op.eqn.primitive.name == "exp"]
    assert (op.times, op.exact) == (1, False)
    assert times(found, "lt") == [1]  # whether it goes on is used


def test_each_branch_counts() -> None:
    found = program(lambda c, x: lax.cond(c, jnp.sin, jnp.cos, x), True, 1.0)
    assert times(found, "sin") == times(found, "cos") == [1]


def test_what_is_not_used_is_not_live() -> None:
    def body(carry: Any, x: Any) -> Any:
        a, b = carry
        return (jnp.sin(a), jnp.cos(b)), (jnp.exp(x), jnp.log(x))

    def function(xs: Any) -> Any:
        (a, _), (ys, _) = lax.scan(body, (1.0, 1.0), xs)
        return a, ys

    found = program(function, jnp.ones(4))
    assert [times(found, name) for name in ("sin", "cos", "exp", "log")] == [[4], [], [4], []]


def test_a_barrier_needs_of_its_operands_the_one_that_it_returns() -> None:
    found = program(lambda x: lax.optimization_barrier((jnp.sin(x), jnp.cos(x)))[0], 1.0)
    assert (times(found, "sin"), times(found, "cos")) == ([1], [])


@pytest.mark.parametrize("forward", [True, False])
def test_a_search_follows_what_a_loop_carries_and_stacks(forward: bool) -> None:
    def body(carry: Any, x: Any) -> Any:
        return carry * x, -carry

    def function(start: Any, xs: Any, other: Any) -> Any:
        end, ys = lax.scan(body, start, xs)
        return end, ys, other + 1.0

    found = program(function, 1.0, jnp.ones(4), 2.0)
    start, goal = (found.arguments, found.results) if forward else (found.results, found.arguments)
    first = [v for v in start[:1] if v is not None]
    reached = found.reached(first, lambda op: True, forward=forward)
    assert [v in reached for v in goal] == [True, True, False]
