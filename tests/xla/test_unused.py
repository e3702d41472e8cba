"""What the results of a jaxpr are not made from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.xla import jaxprs
from zerojax.xla.unused import used_arguments, without_unused

X = jnp.ones(3)


def through_jit(x: Any, y: Any) -> Any:
    return jax.jit(lambda x, y: (x + 1, y + 1))(x, y)[0]


def through_loop(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, each: ((c[0] + each, c[1] * 2), None), (0.0, y), x)[0][0]


def through_choice(x: Any, y: Any) -> Any:
    return lax.cond(x[0] > 0, lambda x, y: x, lambda x, y: 2 * x, x, y)


def chosen_by(x: Any, y: Any) -> Any:
    return lax.cond(y[0] > 0, lambda x: x, lambda x: 2 * x, x)


def printed(x: Any, y: Any) -> Any:
    jax.debug.print("{}", y)
    return x


def norm_of_both(x: Any, y: Any) -> Any:
    return x / jnp.sqrt(jnp.sum(x**2) + jnp.sum(y**2))


def times_nothing(x: Any, y: Any) -> Any:
    """NaN where y is not finite."""
    return x + 0 * y


@pytest.mark.parametrize(
    ("function", "uses_y"),
    [
        (through_jit, False),
        (through_loop, False),
        (through_choice, False),
        (lambda x, y: x + jnp.zeros_like(y), False),
        (chosen_by, True),
        (printed, True),
        (norm_of_both, True),
        (times_nothing, True),
    ],
)
def test_used_arguments(function: Callable[..., Any], uses_y: bool) -> None:
    assert used_arguments(jax.make_jaxpr(function)(X, X)) == [True, uses_y]


def test_whole_equations_use_all_their_operands() -> None:
    def function(x: Any, y: Any) -> Any:
        jnp.tan(x)
        return through_jit(jnp.sin(x), jnp.cos(y))

    jaxpr = jaxprs.open_jaxpr(jax.make_jaxpr(function)(X, X))[0]
    left = [e.primitive.name for e in without_unused(jaxpr, jaxprs.whole).eqns]
    assert left == ["sin", "cos", "jit"]
    assert [e.primitive.name for e in without_unused(jaxpr).eqns] == ["sin", "jit"]


def test_without_unused() -> None:
    def function(x: Any, y: Any) -> Any:
        jnp.cos(y)
        (a, _), _ = lax.scan(lambda c, e: ((c[0] + e, c[1] * e), e * e), (0.0, 1.0), x)
        return a, jax.jit(lambda x, y: (jnp.sin(x), jnp.tan(y)))(x, y)[0]

    closed = jax.make_jaxpr(function)(X, X)
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    pruned = jaxprs.with_body(closed, without_unused(jaxpr))
    text = str(pruned)
    assert "sin" in text
    assert "mul" not in text
    assert not {"cos", "tan"} & {*text.split()}
    for got, want in zip(jaxprs.evaluate(pruned, [X, X]), function(X, X), strict=True):
        assert jnp.array_equal(got, want)
