"""A layer's parameters are gathered before its iteration begins, and are the same numbers."""

import functools
from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import Spec, equations, gathers

import zerojax
from zerojax.collectives import Inserter, Shard, gather_once
from zerojax.collectives.prefetch import LEAST
from zerojax.graph.rows import RowDimensions
from zerojax.xla import jaxprs

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
N, LAYERS = 16, LEAST
SPEC: Spec = (None, "data", None)
X = np.random.default_rng(1).normal(size=(8, N))


def weights(layers: int = LAYERS) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(layers, N, N)) / 4


def scanned(
    layer: Callable[[Any, Any], Any], *, reverse: bool = False, remat: bool = True
) -> Callable[[Any, Any], Any]:
    layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def loss(ws: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws, reverse=reverse)
        return jnp.sum(x**2)

    return loss


def once(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def moved(x: Any, w: Any) -> Any:
    """Used as it is and transposed, and by itself element by element."""
    return jnp.tanh(jnp.tanh(x @ w) @ w.T) + jnp.tanh(x @ jnp.tanh(w)) + jnp.sum(w**2)


def over_time(x: Any, w: Any) -> Any:
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]


CASES = {
    "forward and backward": scanned(once),
    "in reverse": scanned(once, reverse=True),
    "no remat": scanned(once, remat=False),
    "moved": scanned(moved),
    "a loop over time within": scanned(over_time),
}


def inserted(loss: Callable[[Any, Any], Any], *, overlap: bool = True) -> Callable[..., Any]:
    inserter = Inserter(MESH, "data", keep=False, overlap=overlap)

    def run(ws: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(ws, x)
        return tuple(inserter(closed, [Shard(inserter.constrain(ws, SPEC), SPEC), x]))

    return run


@pytest.mark.parametrize("name", CASES)
def test_what_is_inserted_is_an_identity(name: str) -> None:
    plain = jax.value_and_grad(CASES[name])
    assert exact.differing(inserted(CASES[name]), plain, weights(), X) == []


@functools.cache
def moves(name: str, *, overlap: bool = True, layers: int = LAYERS) -> list[tuple[str, ...]]:
    """What each gather stands in."""
    run = inserted(CASES[name], overlap=overlap)
    return [move.inside for move in gathers(jax.make_jaxpr(run)(weights(layers), X))]


@pytest.mark.parametrize("name", ["forward and backward", "in reverse", "a loop over time within"])
def test_each_layer_is_gathered_once_in_each_direction(name: str) -> None:
    """The first before the loop, the second in the first iteration, the last by the second last."""
    assert sorted(moves(name)) == [(), (), (), (), ("scan",), ("scan",)]


def test_what_is_gathered_is_carried_and_not_used() -> None:
    """But in the next iteration: no product in this one waits for the all-gather."""
    jaxpr = jax.make_jaxpr(inserted(CASES["forward and backward"]))(weights(), X)
    loops = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    for loop in loops:
        (body,) = jaxprs.inner(loop)
        (gather,) = gathers(body)
        assert gather.shape == (N, N)
        carried = body.outvars[: jaxprs.scan_parts(loop).carry]
        made = [eqn.outvars[0] for eqn in body.eqns if eqn.outvars[0] in carried]
        (whole,) = [v for v in made if v.aval.shape == (N, N)]
        used = [eqn.primitive.name for eqn in body.eqns if whole in jaxprs.variables(eqn.invars)]
        assert "dot_general" not in used
        # In the loop of the backward pass the cotangents wait for one element of it.
        assert len(used) == (loop is loops[1])


def test_what_an_iteration_keeps_is_stacked_as_a_shard() -> None:
    """The transposed parameter, for the backward pass."""
    loss = scanned(lambda x, w: jnp.tanh(x @ w.T), remat=False)
    jaxpr = jax.make_jaxpr(inserted(loss))(weights(), X)
    loop = next(eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    (body,) = jaxprs.inner(loop)
    makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    (stack,) = [v for v in body.outvars if v.aval.shape == (LAYERS, N, N)]
    v = makers[stack].invars[1]  # of the dynamic_update_slice
    while makers[v].primitive.name in ("broadcast_in_dim", "reshape"):
        (v,) = makers[v].invars
    assert makers[v].primitive.name == "sharding_constraint"
    assert "data" in makers[v].params["sharding"].spec


def test_a_widened_stack_is_gathered_before_it_is_widened() -> None:
    def widened(ws: Any, x: Any) -> Any:
        return CASES["moved"](ws.astype("float32"), x)

    arrays = jnp.asarray(weights(), "bfloat16"), jnp.asarray(X, "float32")
    found = gathers(jax.make_jaxpr(inserted(widened))(*arrays))
    ahead = [move.inside for move in found if move.dtype == "bfloat16"]
    assert ahead.count(()) == 2 * ahead.count(("scan",)) >= 4


def test_layers_that_cast_a_stack_gather_what_they_cast_to() -> None:
    def cast(ws: Any, x: Any) -> Any:
        return scanned(lambda x, w: jnp.tanh(x @ w.astype("bfloat16")))(ws, x)

    arrays = jnp.asarray(weights(), "float32"), jnp.asarray(X, "bfloat16")
    found = gathers(jax.make_jaxpr(inserted(cast))(*arrays))
    assert [move.inside for move in found].count(("scan",)) == 2
    assert {str(move.dtype) for move in found} == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_what_stays_gathered(dtype: str) -> None:
    def loss(ws: Any, x: Any) -> Any:
        return scanned(lambda x, w: jnp.tanh(x @ w.astype(dtype)))(ws, x.astype(dtype))

    def run(ws: Any, x: Any) -> Any:
        inserter = Inserter(MESH, "data", keep=False)
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(ws, x)
        given = [Shard(inserter.constrain(ws, SPEC), SPEC), x]
        how = gather_once.decide_kept(
            closed,
            given,
            gather_once.by_plan(given, inserter, [0]),
            inserter,
            RowDimensions(),
            fill=False,
        )
        return tuple(inserter(closed, gather_once.gather(given, how, inserter)))

    arrays = jnp.zeros((LAYERS, 512, 512)), jnp.zeros((8, 512))
    found = gathers(jax.make_jaxpr(run)(*arrays))
    assert {move.inside for move in found} == {()}
    assert found[-1].dtype == dtype


def test_not_in_a_shorter_loop_nor_where_it_is_turned_off() -> None:
    within = [("scan",), ("scan",)]
    assert sorted(moves("forward and backward", layers=LAYERS - 1)) == within
    assert sorted(moves("forward and backward", overlap=False)) == within
