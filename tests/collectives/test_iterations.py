"""A loop whose first and last iteration run outside it has the results of one that has all."""

from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from zerojax.collectives import iterations
from zerojax.collectives.shard import MovedStack

pytestmark = pytest.mark.usefixtures("quick_compile")

WIDTH = 4


def body(carry: Any, entries: Any, *, last: bool = False) -> Any:
    w, b = entries
    carry = jnp.tanh(carry @ w) + b
    return carry, (carry, {"sum": jnp.sum(carry)})


def run(
    length: int, *, peel: bool, reverse: bool = False, moved: bool = False, unroll: int = 1
) -> Any:
    draw = np.random.default_rng(0).normal
    ws, bs, start = (jnp.asarray(draw(size=(*n, WIDTH))) for n in ((length, WIDTH), (length,), ()))
    first = MovedStack(jnp.moveaxis(ws, 1, 0), 1) if moved else ws
    return iterations.scan(
        body, start, (first, bs), length=length, reverse=reverse, unroll=unroll, peel=peel
    )


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"moved": True}, {"unroll": 3}])
def test_the_results_are_those_of_one_loop(length: int, options: dict[str, Any]) -> None:
    peeled, whole = (lambda peel=peel: run(length, peel=peel, **options) for peel in (True, False))
    assert exact.differing(peeled, whole) == []


@pytest.mark.parametrize(("length", "inside"), [(2, []), (3, [1]), (6, [4])])
def test_the_loop_has_two_iterations_less(length: int, inside: list[int]) -> None:
    jaxpr = jax.make_jaxpr(lambda: run(length, peel=True))()
    loops = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == inside
