"""What a loop uses unsharded is gathered once, before it; its gradient is reduced once, after."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxprs import Spec, equations, gathers, scatters

import zerojax
from zerojax.collectives import Inserter, Shard
from zerojax.collectives.gathering import Thresholds
from zerojax.trace.marks import GRADIENT

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
N = 16
ROWS, COLUMNS = ("data", None), (None, "data")
STACK = (None, "data", None)
TIMES = np.random.default_rng(0).normal(size=(3, 8, N))


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape) / 4


def cut(x: Any, spec: Spec) -> Any:
    """A gradient as the step constrains it."""
    x = checkpoint_name(x, GRADIENT)
    return lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec(*spec)))


def over_time(w: Any, xs: Any, cell: Callable[[Any, Any], Any]) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = cell(h, x)
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros((8, N), xs.dtype), xs)[1] ** 2)


def plain(w: Any, xs: Any) -> Any:
    return over_time(w, xs, lambda h, x: jnp.tanh(h @ w + x))


def twice(w: Any, xs: Any) -> Any:
    """Two products with the same weight in an iteration."""
    return over_time(w, xs, lambda h, x: jnp.tanh(jnp.tanh(h @ w) @ w + x))


def gates(w: Any, xs: Any) -> Any:
    """Weights side by side in one product, as in an LSTM, whose gradient is split."""

    def cell(h: Any, x: Any) -> Any:
        one, other = jnp.split(h @ jnp.concatenate([w, w], axis=1), 2, axis=1)
        return jax.nn.sigmoid(one) * jnp.tanh(other + x)

    return over_time(w, xs, cell)


def rematerialised(w: Any, xs: Any) -> Any:
    return over_time(w, xs, jax.checkpoint(lambda h, x: jnp.tanh(h @ w + x)))


def stored(w: Any, xs: Any) -> Any:
    """The sum of what is looked up, in a loop of known length."""
    return lax.fori_loop(0, 3, lambda i, s: s + jnp.sum(jnp.tanh(xs[i] @ w)), 0.0)


def layers(w: Any, xs: Any) -> Any:
    """A loop over time within one over layers."""

    def layer(xs: Any, w: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x)
            return h, h

        return lax.scan(step, jnp.zeros((8, N), xs.dtype), xs)[1], None

    return jnp.sum(lax.scan(layer, xs, w)[0] ** 2)


def layers_over_time(w: Any, xs: Any) -> Any:
    """A loop over layers within one over time."""
    return over_time(
        w, xs, lambda h, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h + x, w)[0]
    )


ONE = (N, N)
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[Spec]]] = {
    "plain": (plain, ONE, [ROWS, COLUMNS, (None, None)]),
    "twice": (twice, ONE, [ROWS]),
    "gates": (gates, ONE, [ROWS, COLUMNS]),
    "remat": (rematerialised, ONE, [COLUMNS]),
    "fori": (stored, ONE, [ROWS]),
    "layers": (layers, (2, *ONE), [STACK]),
    "layers over time": (layers_over_time, (2, *ONE), [STACK]),
}


def step_of(name: str, spec: Spec, **options: Any) -> tuple[Any, Any]:
    """The loss and its gradient, cut as the step cuts it; plain, and with collectives in it."""
    function, _, _ = CASES[name]
    inserter = Inserter(MESH, "data", **{"keep": False} | options)

    def both(w: Any, xs: Any) -> Any:
        loss, grad = jax.value_and_grad(function)(w, xs)
        return loss, cut(grad, spec)

    def inserted(w: Any, xs: Any) -> Any:
        closed = jax.make_jaxpr(both)(w, xs)
        shard = Shard(inserter.constrain(w, spec), spec) if any(spec) else w
        return tuple(inserter(closed, [shard, xs]))

    return jax.value_and_grad(function), inserted


CELLS = [
    (name, spec, keep) for name, case in CASES.items() for spec in case[2] for keep in (False, True)
]


@pytest.mark.parametrize(("name", "spec", "keep"), CELLS)
def test_what_is_inserted_is_an_identity(name: str, spec: Spec, keep: bool) -> None:
    plain, inserted = step_of(name, spec, keep=keep)
    assert exact.differing(inserted, plain, weight(*CASES[name][1]), TIMES) == []


def traced(name: str, **options: Any) -> Any:
    _, shape, specs = CASES[name]
    return jax.make_jaxpr(step_of(name, specs[0], **options)[1])(weight(*shape), TIMES)


@pytest.mark.parametrize("name", ["plain", "twice", "gates", "remat", "fori"])
def test_constants_are_gathered_once_before_each_loop(name: str) -> None:
    """One for the loop forward, one for the loop backward."""
    found = gathers(traced(name))
    assert 1 <= len(found) <= 2
    assert all(move.inside == () for move in found)
    assert len(gathers(traced(name, keep=True))) == 1


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["plain", "gates", "remat", "fori"])
def test_gradients_are_scattered_once_after_the_loop(name: str, keep: bool) -> None:
    """The zeros that the sum starts from are cut as well, and one weight has one product."""
    jaxpr = traced(name, keep=keep)
    assert {move.inside for move in scatters(jaxpr)} == {()}
    last = max(i for i, (_, e) in enumerate(equations(jaxpr)) if e.primitive.name == "scan")
    after = list(equations(jaxpr))[last + 1 :]
    assert any(e.primitive.name == "sharding_constraint" for _, e in after)


@pytest.mark.parametrize("name", ["layers", "layers over time"])
def test_a_stack_is_still_gathered_and_scattered_a_layer_at_a_time(name: str) -> None:
    jaxpr = traced(name)
    for found in (gathers(jaxpr), scatters(jaxpr)):
        inside = [move for move in found if move.inside]
        assert inside
        assert all(move.shape == ONE for move in inside)
    assert all(move.inside for move in gathers(jaxpr))


def test_a_loop_over_micro_batches_is_left_alone() -> None:
    """The user's own: each iteration makes gradients, and sends them as it makes them."""

    def accumulated(w: Any, xs: Any) -> Any:
        def micro(total: Any, x: Any) -> Any:
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), None

        return lax.scan(micro, jnp.zeros_like(w), xs)[0]

    def run(w: Any, xs: Any) -> Any:
        closed = jax.make_jaxpr(lambda w, xs: cut(accumulated(w, xs), ROWS))(w, xs)
        inserter = Inserter(MESH, "data", keep=False)
        return inserter(closed, [Shard(inserter.constrain(w, ROWS), ROWS), xs])[0]

    jaxpr = jax.make_jaxpr(run)(weight(N, N), TIMES)
    assert {move.inside for move in gathers(jaxpr)} == {("scan",)}
    assert ("scan",) in {move.inside for move in scatters(jaxpr)}
    assert exact.differing(run, accumulated, weight(N, N), TIMES) == []


def test_more_than_may_be_held_is_gathered_inside() -> None:
    jaxpr = traced("plain", thresholds=Thresholds(held=N * N - 1))
    assert {move.inside for move in gathers(jaxpr)} == {("scan",)}
    assert ("scan",) in {move.inside for move in scatters(jaxpr)}
