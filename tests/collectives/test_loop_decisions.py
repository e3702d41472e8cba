"""The decisions on a loop: what it gathers and reduces, and where. Nothing is compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from collectives.test_ahead import scanned
from collectives.test_loops import COLUMNS, MESH, ROWS, STACK, TIMES, N, plain, weight
from collectives.test_loops import layers as layers_over_time
from jax import lax
from jaxprs import Spec, equations

from zerojax.collectives import Inserter, Shard, held, loop_decisions, loops
from zerojax.collectives.ahead import LEAST
from zerojax.collectives.gathering import Scope
from zerojax.collectives.loop_decisions import LoopDecisions
from zerojax.collectives.shard import Gathering
from zerojax.graph.def_use import graph_of
from zerojax.xla import jaxprs


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def decided(
    loss: Callable[..., Any],
    weights: Any,
    spec: Spec,
    data: Any,
    *,
    backward: bool = False,
    prefetch: bool = True,
    by_loop: bool = False,
) -> LoopDecisions:
    """For the loop of the forward or of the backward pass, whose operands of the shape of the
    weights are shards, and whose results of their shape are gradients."""
    jaxpr = jax.make_jaxpr(jax.grad(loss))(weights, data)
    loop = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "scan"][
        -1 if backward else 0
    ]
    arrays = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in loop.invars]
    values = [
        Shard(x, spec, gathering=Gathering(by_loop=by_loop)) if x.shape == weights.shape else x
        for x in arrays
    ]
    carried = loop.params["num_carry"]
    entry = [spec if i < carried else spec[1:] for i in range(len(loop.outvars))]
    want = [
        entry[i] if backward and v.aval.shape == weights.shape else None
        for i, v in enumerate(loop.outvars)
    ]
    scope = Scope(share=True, batch_rows=len(data), behind=True)
    inserter = Inserter(MESH, "data", keep=False)
    return loop_decisions.decide(loop, values, want, inserter, scope, updated={}, prefetch=prefetch)


def layers(length: int, spec: Spec = STACK, **options: Any) -> LoopDecisions:
    return decided(scanned(layer, remat=False), weight(length, N, N), spec, weight(8, N), **options)


def test_layers_are_gathered_one_iteration_ahead() -> None:
    assert list(layers(LEAST).ahead) == [0]
    assert not layers(LEAST - 1).ahead
    assert not layers(LEAST, prefetch=False).ahead


def test_a_loop_that_fills_a_stack_gathers_it_ahead() -> None:
    found = layers(LEAST, prefetch=False, by_loop=True)
    assert list(found.ahead) == [0]
    assert found.filled == {0: 1}


def test_a_stack_that_is_sharded_along_its_layers_is_gathered_before() -> None:
    found = layers(LEAST, ("data", None, None))
    assert found.gathered == {0}
    assert not found.ahead


def test_gradients_of_layers_are_reduced_one_iteration_later() -> None:
    found = layers(LEAST, backward=True)
    assert len(found.behind) == 1
    assert found.of_layer
    assert not found.sums.terms
    assert not layers(LEAST - 1, backward=True).behind


@pytest.mark.parametrize("spec", [ROWS, COLUMNS])
def test_a_loop_over_time_holds_its_weight_and_adds_up_its_gradient(spec: Spec) -> None:
    forward = decided(plain, weight(N, N), spec, TIMES)
    backward = decided(plain, weight(N, N), spec, TIMES, backward=True)
    assert forward.held == backward.held == {0}
    assert len(backward.sums.terms) == 1
    assert not backward.of_layer


ONE = (N, N)
LAYERS = (4, N, N)


def is_held(function: Callable[..., Any], spec: Any, *shapes: tuple[int, ...]) -> bool:
    """Whether a body that takes a constant first needs it unsharded; the rest is carried."""
    jaxpr = jax.make_jaxpr(function)(*(weight(*shape) for shape in shapes), 0)
    return held.decide(jaxpr, [Shard(weight(*shapes[0]), spec)], MESH) == {0}


def test_what_an_iteration_needs() -> None:
    def remat(w: Any, x: Any, i: Any) -> Any:
        return jax.checkpoint(lambda w, x: layers_over_time(w.astype("bfloat16"), x))(w, x)

    turned = jax.jit(lambda w, x, i: x @ w.T.astype("bfloat16"))
    assert is_held(lambda w, x, i: x @ w, ROWS, ONE, ONE)
    assert is_held(turned, ROWS, ONE, ONE)
    assert is_held(lambda w, x, i: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), ROWS, ONE, ONE)
    assert not is_held(lambda w, x, i: layers_over_time(w, x), STACK, LAYERS, (3, 8, N))
    assert not is_held(lambda w, x, i: (w, x), ROWS, ONE, ONE)
    assert not is_held(remat, STACK, LAYERS, (3, 8, N))


def test_a_layer_an_iteration() -> None:
    def by_call(w: Any, x: Any, i: Any) -> Any:
        return jax.jit(lambda w, i: x @ w[i])(w.transpose(0, 2, 1), i)

    assert not is_held(lambda w, x, i: x @ w[i], STACK, LAYERS, ONE)
    assert not is_held(by_call, STACK, LAYERS, ONE)
    # The same layer in each iteration; a dimension that is sharded; rows of a table.
    assert is_held(lambda w, x, i: x @ w[1], STACK, LAYERS, ONE)
    assert is_held(lambda w, x, i: x @ w[i], ("data", None, None), LAYERS, ONE)
    assert is_held(lambda w, x, i: x + w[i], (None, "data"), ONE, ONE)


@pytest.mark.parametrize(("dimensions", "stacks"), [(3, True), (2, False)])
def test_the_gradient_of_a_layer_stays_in_its_stack(dimensions: int, stacks: bool) -> None:
    shape = LAYERS[-dimensions:]

    def loss(w: Any, x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return jnp.tanh(x * w[i].sum(0) if stacks else x * w[i])

        return lax.fori_loop(0, len(w), body, x).sum()

    closed = jax.make_jaxpr(jax.grad(loss))(weight(*shape), weight(8, N))
    *_, loop = graph_of(jaxprs.open_jaxpr(closed)[0]).named("scan")
    specs = [(None,) * (v.aval.ndim - 1) + ("data",) if v.aval.shape == shape else None
             for v in loop.outvars]  # fmt: skip
    assert bool(loops.Sums(loop, specs).stacks) is stacks
