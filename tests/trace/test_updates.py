"""Gradients that the dataflow of a step tells, and programs in which it tells none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from zerojax.trace.updates import find_gradients
from zerojax.xla import jaxprs

BATCH = jax.ShapeDtypeStruct((16, 4), jnp.float32)
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
Grad = Callable[[Any, Any], Any]


def network() -> Any:
    return {"w": jnp.ones((4, 8)), "bias": jnp.ones(8), "scale": jnp.ones(())}


def loss(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["bias"]) * params["scale"]) ** 2)


def decayed(params: Any, x: Any) -> jax.Array:
    """A term of the loss that is added to the gradient element by element."""
    return loss(params, x) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


@jax.custom_vjp
def reversed_slope(x: Any) -> Any:
    return x


reversed_slope.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


def at_a_worse_point(params: Any, x: Any) -> Any:
    """The gradient of sharpness-aware minimization: only the second reaches the update."""
    first = jax.grad(loss)(params, x)
    return jax.grad(loss)(jax.tree.map(lambda p, g: p + 0.1 * g, params, first), x)


def of_half(params: Any, x: Any) -> Any:
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(half, x))


def step(grad: Grad, tx: Any = ADAM) -> Callable[..., Any]:
    def updated(params: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(grad(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return updated


def found(run: Callable[..., Any], tx: Any = ADAM) -> list[tuple[int, ...]]:
    state = (network(), tx.init(network()))
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(run)(*state, BATCH))
    state_leaves = range(len(jax.tree.leaves(state)))
    return sorted(v.aval.shape for v in find_gradients(jaxpr, state_leaves))


@pytest.mark.parametrize(
    "grad",
    [
        jax.grad(loss), jax.grad(jax.jit(loss)), jax.grad(jax.checkpoint(loss)), jax.grad(decayed),
        jax.grad(lambda p, x: loss(jax.tree.map(reversed_slope, p), x)), at_a_worse_point, of_half,
    ],
)  # fmt: skip
def test_one_gradient_a_parameter(grad: Grad) -> None:
    assert found(step(grad)) == [(), (4, 8), (8,)]


def test_a_frozen_parameter_has_none() -> None:
    kinds = {"moves": optax.sgd(0.1), "stays": optax.set_to_zero()}
    tx = optax.partition(kinds, {"w": "stays", "bias": "moves", "scale": "moves"})
    assert found(step(jax.grad(loss), tx), tx) == [(), (8,)]


def added(params: Any, x: Any) -> Any:
    return jax.tree.map(jnp.add, jax.grad(loss)(params, x), jax.grad(decayed)(params, x))


def of_rows(params: Any, x: Any) -> Any:
    rows = jax.vmap(lambda row: jax.grad(loss)(params, row[None]))(x)
    return jax.tree.map(lambda g: g.mean(0), rows)


def of_micro_batches(params: Any, x: Any) -> Any:
    def add(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(4, 4, 4))[0]


def of_one_vector(params: Any, x: Any) -> Any:
    vector, tree = ravel_pytree(params)
    return tree(jax.grad(lambda v: loss(tree(v), x))(vector))


@pytest.mark.parametrize("grad", [added, of_rows, of_micro_batches, of_one_vector])
def test_none_where_it_is_not_certain(grad: Grad) -> None:
    assert found(step(grad)) == []


def test_none_of_several_updates() -> None:
    once = step(jax.grad(loss))

    def in_a_loop(params: Any, opt_state: Any, x: Any) -> Any:
        return lax.scan(lambda s, _: (once(*s, x), None), (params, opt_state), None, length=2)[0]

    assert found(lambda *args: once(*once(*args), args[-1])) == []
    assert found(in_a_loop) == []


def test_none_where_one_updates_after_another() -> None:
    """A critic reads the new generator: two updates have no one norm."""

    def run(first: Any, second: Any, x: Any) -> Any:
        first = jax.tree.map(jnp.subtract, first, jax.grad(loss)(first, x))

        def judged(second: Any) -> jax.Array:
            return loss(second, x * loss(first, x))

        return first, jax.tree.map(jnp.subtract, second, jax.grad(judged)(second))

    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(run)(network(), network(), BATCH))
    assert find_gradients(jaxpr, range(6)) == []


def test_none_where_another_gradient_is_kept_beside() -> None:
    """The state's third array holds the first gradient, which is not what the update takes."""

    def run(params: Any, kept: Any, x: Any) -> Any:
        first, second = jax.grad(loss)(params, x), at_a_worse_point(params, x)
        return jax.tree.map(lambda p, g: p - g, params, second), first

    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(run)(network(), network(), BATCH))
    assert find_gradients(jaxpr, range(6)) == []
