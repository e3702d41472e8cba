"""The sums that stand for a parameter which is there already."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from zerojax.collectives import Inserter
from zerojax.trace.changes import change, find_sums
from zerojax.xla import jaxprs

X = jnp.arange(3.0)


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda p, u, new: p + change(new, p, u), 1),
        (lambda p, u, new: change(new, p, u) + p, 1),
        (lambda p, u, new: jnp.asarray(p + change(new, p, u)).astype(jnp.bfloat16), 2),
        (lambda p, u, new: p.astype(jnp.float16) + change(new, p, u), 1),
        (lambda p, u, new: p + 0.5 * change(new, p, u), 0),
        (lambda p, u, new: 2 * p + change(new, p, u), 0),
        (lambda p, u, new: change(new, p, u) + 1.0, 0),
        (lambda p, u, new: p + u, 0),
    ],
)
def test_what_is_found(step: Callable[..., jax.Array], found: int) -> None:
    closed = jax.make_jaxpr(step)(X, X, X)
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    at = find_sums(jaxpr)
    assert len(at) == found
    assert all(new is jaxpr.invars[2] for new in at.values())


def test_the_step_gets_the_array_itself() -> None:
    def step(p: jax.Array, u: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = p + change(new, p, u)
        return after, 2 * after

    closed = jax.make_jaxpr(step)(X, X, X)
    inserter = Inserter(jax.sharding.Mesh(jax.devices()[:1], ("data",)), "data", keep=True)
    p, u, new = X, 10 * X, X + 7
    after, twice = inserter(closed, [p, u, new])
    assert after is new
    assert twice.tolist() == (2 * new).tolist()


def test_elsewhere_it_is_the_update() -> None:
    assert jax.jit(change)(X, X, 3 * X).tolist() == (3 * X).tolist()
