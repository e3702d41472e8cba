"""How often equations run, and the first use of a value."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.graph.search import first_use, needed_runs
from zerojax.xla.jaxprs import open_jaxpr


@jax.jit
def layer(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2.0


def function(x: jax.Array) -> Any:
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        y, _ = lax.scan(lambda carry, _: (layer(carry), None), jnp.cos(carry), None, length=3)
        return y, None

    y, _ = lax.scan(body, layer(layer(x)), None, length=5)
    jnp.tan(y)  # nothing needs it
    return lax.cond(y.sum() > 0, layer, lax.abs, y)


def test_runs_count_the_iterations_of_the_loops_around() -> None:
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(function)(jnp.ones(3)))
    found = [(run.equation.primitive.name, run.times) for run in needed_runs(jaxpr)]
    assert [times for name, times in found if name == "sin"] == [1, 1, 15, 1]
    assert ("cos", 5) in found
    assert ("abs", 1) in found  # each branch counts
    assert "tan" not in dict(found)


def test_a_loop_of_unknown_length_counts_once() -> None:
    jaxpr, _ = open_jaxpr(
        jax.make_jaxpr(lambda x: lax.while_loop(lambda y: y < 9.0, jnp.exp, jnp.cos(x)))(1.0)
    )
    found = {run.equation.primitive.name: (run.times, run.exact) for run in needed_runs(jaxpr)}
    assert (found["cos"], found["exp"], found["lt"]) == ((1, True), (1, False), (1, False))


def test_the_first_use_is_behind_moves_casts_and_calls() -> None:
    def program(x: jax.Array, y: jax.Array) -> Any:
        low = x.T.astype(jnp.bfloat16)
        return layer(low), jnp.cos(x), y.reshape(-1)

    jaxpr, _ = open_jaxpr(jax.make_jaxpr(program)(jnp.ones((2, 3)), jnp.ones((2, 3))))
    x, y = jaxpr.invars
    use = first_use(jaxpr, x)
    assert use is not None
    assert use.primitive.name == "sin"
    assert first_use(jaxpr, y) is None
