"""A body with gathers in it computes what it computed without them."""

from collections.abc import Callable, Sequence
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxprs import Move, Spec, gathers, primitives, scatters

import zerojax
from zerojax.collectives import Inserter, Shard
from zerojax.collectives.gathering import Thresholds
from zerojax.trace.marks import GRADIENT

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
N = 16


class Inserted:
    """``function(params, *others)`` with its parameters sharded; ``params`` is a list."""

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Spec],
        *,
        keep: bool,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.function, self.specs = function, specs
        self.inserter = Inserter(MESH, "data", keep=keep, thresholds=thresholds)

    def __call__(self, params: list[jax.Array], *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(self.function, return_shape=True)(params, *others)
        cut = [
            Shard(self.inserter.constrain(x, spec), spec) if any(spec) else x
            for x, spec in zip(params, self.specs, strict=True)
        ]
        outs = self.inserter(closed, [*cut, *jax.tree.leaves(others)])
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    def check(self, params: list[np.ndarray], *others: Any) -> None:
        """Compares what it computes with the function, without a compile."""
        assert exact.differing(self, self.function, params, *others) == []

    def jaxpr(self, params: list[np.ndarray], *others: Any) -> Any:
        return jax.make_jaxpr(self)(params, *others)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


X = normal(4, N)
W = normal(N, N)
B = normal(N)
STACK = normal(3, N, N)
ROWS, COLUMNS = ("data", None), (None, "data")


def mlp(params: Any, x: Any) -> Any:
    first, bias, second = params
    return jnp.sum(jnp.tanh(x @ first + bias) @ second)


def scanned(params: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[0])[0])


def scanned_remat(params: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w), prevent_cse=False)
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, params[0])[0])


def carried(params: Any, x: Any) -> Any:
    """The parameter itself is carried, and changes."""
    return lax.scan(lambda w, x: (w * 0.9, x @ w), params[0], x[None].repeat(3, 0))


def stacked_out(params: Any, x: Any) -> Any:
    """The loop hands its slices on, scaled, for a second one."""
    ws = lax.scan(lambda c, w: (c, w * 2), 0, params[0])[1]
    return scanned([ws], x)


def branched(params: Any, x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x - jnp.sum(w), params[0])


def looped(params: Any, x: Any) -> Any:
    def going(carry: Any) -> Any:
        return (carry[0] < 3) & (jnp.sum(params[0]) < 1e9)

    return lax.while_loop(going, lambda c: (c[0] + 1, jnp.tanh(c[1] @ params[0])), (0, x))[1]


def nested(params: Any, x: Any) -> Any:
    @jax.jit
    def inner(w: Any, x: Any) -> Any:
        return jax.jit(lambda w: x @ w)(w * 2)

    return inner(params[0], x)


def rematerialised(params: Any, x: Any) -> Any:
    first, bias, second = params
    block = jax.checkpoint(lambda x, w, b: jnp.tanh(jnp.tanh(x @ w + b) @ w))
    return jnp.sum(block(x, first, bias) @ second)


def combined(params: Any, x: Any) -> Any:
    w = jnp.where(params[0] > 0, params[0], jnp.exp(params[0]) - 1)
    w = w / jnp.sqrt(jnp.sum(w**2)) + jnp.maximum(w, 0.1).astype("float32").astype(w.dtype)
    return x @ w


def two_at_once(params: Any, x: Any) -> Any:
    """Operands that are cut differently do not combine as shards."""
    return x @ (params[0] + params[1])


CASES: dict[str, tuple[Callable[..., Any], list[np.ndarray], list[Spec]]] = {
    "mlp": (mlp, [W, B, W + 1], [COLUMNS, ("data",), ROWS]),
    "scan": (scanned, [STACK], [(None, "data", None)]),
    "scan over a cut stack": (scanned, [normal(8, N, N)], [("data", None, None)]),
    "scan of remat": (scanned_remat, [STACK], [(None, None, "data")]),
    "scan that carries": (carried, [W], [ROWS]),
    "scan that stacks": (stacked_out, [STACK], [(None, "data", None)]),
    "cond": (branched, [W], [ROWS]),
    "while": (looped, [W], [ROWS]),
    "nested jit": (nested, [W], [ROWS]),
    "remat": (rematerialised, [W, B, W + 1], [COLUMNS, ("data",), ROWS]),
    "elementwise": (combined, [W], [ROWS]),
    "two cuts": (two_at_once, [W, W + 1], [ROWS, COLUMNS]),
}
DIFFERENTIABLE = ["mlp", "scan", "scan over a cut stack", "scan of remat", "remat"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_same_values(name: str, keep: bool) -> None:
    function, params, specs = CASES[name]
    with jax.enable_x64(True):
        Inserted(function, specs, keep=keep).check(params, X)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_same_gradients(name: str, keep: bool) -> None:
    """Gradients constrained to their shards, as the step has them."""
    function, params, specs = CASES[name]

    def both(params: Any, x: Any) -> Any:
        loss, (grads, dx) = jax.value_and_grad(function, argnums=(0, 1))(params, x)
        return loss, [cut(g, spec) for g, spec in zip(grads, specs, strict=True)], dx

    with jax.enable_x64(True):
        Inserted(both, specs, keep=keep).check(params, X)


def cut(x: jax.Array, spec: Spec) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, PartitionSpec(*spec)))


def inserted(name: str, *, keep: bool = False, grad: bool = False) -> Any:
    """The jaxpr of a case after insertion; with ``grad`` that of its gradients."""
    function, params, specs = CASES[name]
    made = jax.grad(function) if grad else function
    return Inserted(made, specs, keep=keep).jaxpr(params, X)


def test_gathered_again_in_the_backward_pass() -> None:
    """The second matrix is needed for the cotangent of its input, the first is not."""
    shapes = [move.shape for move in gathers(inserted("mlp", grad=True))]
    assert shapes.count((N, N)) == 3
    kept = [move.shape for move in gathers(inserted("mlp", grad=True, keep=True))]
    assert kept.count((N, N)) == 2


def twice(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params[0]) @ params[0]


@pytest.mark.parametrize("keep", [False, True])
def test_one_gather_serves_all_uses_of_a_pass(keep: bool) -> None:
    jaxpr = Inserted(twice, [ROWS], keep=keep).jaxpr([W], X)
    assert len(gathers(jaxpr)) == 1
    assert "optimization_barrier" not in primitives(jaxpr)


def test_the_backward_pass_gathers_anew_and_waits() -> None:
    """Without the barrier XLA would merge the two gathers and keep the result between."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(twice(params, x))

    jaxpr = Inserted(jax.grad(loss), [ROWS], keep=False).jaxpr([W], X)
    assert len(gathers(jaxpr)) == 2
    assert primitives(jaxpr).count("optimization_barrier") == 1
    kept = Inserted(jax.grad(loss), [ROWS], keep=True).jaxpr([W], X)
    assert "optimization_barrier" not in primitives(kept)


def test_several_matrices_stay_unsharded_up_to_a_limit() -> None:
    """One of three does; the second would exceed the limit."""

    def thrice(params: Any, x: Any) -> Any:
        for _ in range(3):
            for w in params:
                x = jnp.tanh(x @ w)
        return x

    jaxpr = Inserted(thrice, [ROWS] * 3, keep=False, thresholds=Thresholds(ahead=N * N)).jaxpr(
        [W] * 3, X
    )
    assert len(gathers(jaxpr)) == 1 + 2 * 3


def test_gathered_in_advance_is_not_gathered_again() -> None:
    """Stages 1 and 2 hand the gathered parameter in."""
    inserter = Inserter(MESH, "data", keep=True)

    def run(w: Any, whole: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(lambda w, x: (x @ w, w * 2))(w, x)
        return inserter(closed, [Shard(w, ROWS).with_copy(whole), x])

    assert gathers(jax.make_jaxpr(run)(W, W, X)) == []
    product, double = run(W, W + 1, X)
    np.testing.assert_allclose(product, X @ (W + 1), rtol=1e-5)
    np.testing.assert_allclose(double, W * 2, rtol=1e-6)


def test_elementwise_work_and_reductions_run_on_shards() -> None:
    def penalty(params: Any) -> Any:
        return jnp.sum(jnp.square(params[0]) * 0.5 + jnp.abs(params[0])) + jnp.max(params[0])

    assert gathers(Inserted(penalty, [ROWS], keep=False).jaxpr([W])) == []


def test_the_cast_comes_before_the_gather() -> None:
    def low(params: Any, x: Any) -> Any:
        return x.astype("bfloat16") @ params[0].astype("bfloat16").T

    jaxpr = Inserted(low, [ROWS], keep=False).jaxpr([normal(N, 8)], normal(4, 8))
    assert gathers(jaxpr) == [Move((), (8, N), "bfloat16")]


def test_a_stack_is_gathered_a_layer_at_a_time() -> None:
    (move,) = gathers(inserted("scan"))
    assert move == Move(("scan",), (N, N), "float32")


def test_a_stack_cut_along_its_layers_is_gathered_before_the_loop() -> None:
    (move,) = gathers(inserted("scan over a cut stack"))
    assert move == Move((), (8, N, N), "float32")


def test_gathered_inside_a_branch() -> None:
    """At stage 3 where it is used, at stages 1 and 2 before."""
    assert [move.inside for move in gathers(inserted("cond"))] == [("cond",)]
    assert [move.inside for move in gathers(inserted("cond", keep=True))] == [()]


def test_one_gather_an_iteration_serves_both_uses() -> None:
    """Forward one; in the backward pass one more, for the block run again and its cotangents."""
    found = gathers(inserted("scan of remat", grad=True))
    assert [move.shape for move in found] == [(N, N), (N, N)]
    assert all(move.inside == ("scan",) for move in found)


def test_one_gather_serves_a_rematerialised_block() -> None:
    """Run again for the backward pass it gathers its matrix once, for three uses."""
    found = [move.shape for move in gathers(inserted("remat", grad=True))]
    forward, backward, second = 1, 1, 2
    assert found.count((N, N)) == forward + backward + second


def test_calls_leave_no_trace() -> None:
    jaxpr = inserted("nested jit")
    assert "jit" not in primitives(jaxpr)
    assert len(gathers(jaxpr)) == 1


def scattered_gradients(name: str) -> list[Move]:
    function, params, specs = CASES[name]

    def grads(params: Any, x: Any) -> Any:
        found = jax.grad(function)(params, x)
        marked = [checkpoint_name(g, GRADIENT) for g in found]
        return [cut(g, spec) for g, spec in zip(marked, specs, strict=True)]

    return scatters(Inserted(grads, specs, keep=False).jaxpr(params, X))


def test_gradients_are_scattered_where_they_are_made() -> None:
    assert sorted(move.shape for move in scattered_gradients("mlp")) == [(N,), (N, N), (N, N)]


@pytest.mark.parametrize("name", ["scan", "scan of remat"])
def test_gradients_are_scattered_inside_the_loop(name: str) -> None:
    assert {(m.inside[:1], m.shape) for m in scattered_gradients(name)} == {(("scan",), (N, N))}


def test_the_users_own_constraint_on_a_parameter_changes_nothing() -> None:
    """flax unboxes a partitioned parameter with one: that is no use of it."""

    def unboxed(params: Any, x: Any) -> Any:
        return x @ cut(params[0], (None, None))

    assert [m.shape for m in gathers(Inserted(unboxed, [ROWS], keep=False).jaxpr([W], X))] == [
        (N, N)
    ]
