"""A layer's parameters are gathered before its iteration begins, and are the same numbers."""

import functools
from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jaxprs import Spec, equations, gathers, the
from swept import swept

import zerojax
from zerojax.collectives import Inserter, Shard, kept
from zerojax.collectives.ahead import LEAST, PrefetchedStacks, decide
from zerojax.collectives.shard import Gathering, HostStack
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


def rounded(x: Any, w: Any) -> Any:
    """Cast to fewer bytes, and used in both dtypes."""
    low = jax.jit(lambda w: (-w.T).reshape(N * N).astype("float32"))(w)
    return jnp.tanh(x @ low.reshape(N, N).astype(x.dtype)) + jnp.tanh(x @ w)


def held_apart(x: Any, w: Any) -> Any:
    """A rematerialised block behind the barrier of `jax.checkpoint`, twice."""
    block = jax.checkpoint(once)
    return block(block(x, w), w)


def over_time(x: Any, w: Any) -> Any:
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]


CASES = {
    "forward and backward": scanned(once),
    "in reverse": scanned(once, reverse=True),
    "no remat": scanned(once, remat=False),
    "moved": scanned(moved),
    "rounded": scanned(rounded),
    "held apart": scanned(held_apart, remat=False),
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


@pytest.mark.parametrize("name", swept(CASES))
def test_same_numbers(name: str) -> None:
    tolerance = 1e-6 if name == "rounded" else 1e-12
    with jax.enable_x64(True):
        got = jax.jit(inserted(CASES[name]))(weights(), X)
        for a, b in zip(got, jax.jit(jax.value_and_grad(CASES[name]))(weights(), X), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


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
        carried = body.outvars[: jaxprs.scan_counts(loop).carry]
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


@pytest.mark.parametrize("remat", swept([False, True]))
def test_a_widened_stack_is_gathered_before_it_is_widened(remat: bool) -> None:
    loss = scanned(moved, remat=remat)

    def widened(ws: Any, x: Any) -> Any:
        return loss(ws.astype("float32"), x)

    arrays = jnp.asarray(weights(), "bfloat16"), jnp.asarray(X, "float32")
    found = gathers(jax.make_jaxpr(inserted(widened))(*arrays))
    ahead = [move.inside for move in found if move.dtype == "bfloat16"]
    assert ahead.count(()) == 2 * ahead.count(("scan",)) >= 4
    for a, b in zip(
        jax.jit(inserted(widened))(*arrays), jax.jit(jax.value_and_grad(widened))(*arrays),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_what_stays_gathered(dtype: str) -> None:
    def loss(ws: Any, x: Any) -> Any:
        return scanned(lambda x, w: jnp.tanh(x @ w.astype(dtype)))(ws, x.astype(dtype))

    def run(ws: Any, x: Any) -> Any:
        inserter = Inserter(MESH, "data", keep=False)
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(ws, x)
        given = [Shard(inserter.constrain(ws, SPEC), SPEC), x]
        how = kept.decide(closed, given, kept.by_plan(given, inserter, [0]), inserter, fill=False)
        return tuple(inserter(closed, kept.gather(given, how, inserter)))

    arrays = jnp.zeros((LAYERS, 512, 512)), jnp.zeros((8, 512))
    found = gathers(jax.make_jaxpr(run)(*arrays))
    assert {move.inside for move in found} == {()}
    assert found[-1].dtype == dtype


def test_not_in_a_shorter_loop_nor_where_it_is_turned_off() -> None:
    within = [("scan",), ("scan",)]
    assert sorted(moves("forward and backward", layers=LAYERS - 1)) == within
    assert sorted(moves("forward and backward", overlap=False)) == within


class TestStacks:
    """Entries come in from host memory likewise, see test_host.py."""

    STACK = np.arange(12, dtype="float32").reshape(4, 3)

    class Twice:
        """A :class:`zerojax.collectives.host.Fetchable` of twice the stack."""

        def fetched(self) -> jax.Array:
            return jnp.asarray(2 * TestStacks.STACK)

        def entry(self, index: Any) -> jax.Array:
            return self.fetched()[index]

    def ahead(self, xs: list[Any], *, reverse: bool = False) -> PrefetchedStacks:
        inserter = Inserter(MESH, "data", keep=False)
        stacks = [self.STACK for _ in xs]
        jaxpr = jax.make_jaxpr(
            lambda *xs: lax.scan(lambda c, x: (c, [y + 1 for y in x]), 0.0, xs, reverse=reverse)
        )(*stacks)
        scan = the(jaxpr, "scan")
        return PrefetchedStacks(scan, xs, decide(scan, xs, inserter, gathers=True), inserter)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_each_iteration_has_its_entries(self, reverse: bool) -> None:
        stack = jnp.asarray(self.STACK)
        host = Shard(self.Twice(), (None, None), gathering=Gathering(host=True))  # type: ignore[arg-type]
        ahead = self.ahead([stack, HostStack(stack), host], reverse=reverse)

        def body(come: Any, at: Any) -> Any:
            index, rest = at
            return ahead.read(index), ahead.merged(come, rest)

        loop = (ahead.order(), ahead.rest())
        scan = functools.partial(lax.scan, body, length=len(self.STACK), reverse=reverse)
        _, got = jax.jit(lambda: scan(ahead.first(), loop))()
        for y, factor in zip(got, [1, 1, 2], strict=True):
            np.testing.assert_array_equal(y, factor * self.STACK)

    def test_without_any_there_is_nothing_to_order(self) -> None:
        ahead = self.ahead([jnp.asarray(self.STACK)])
        assert ahead.order() is None
        assert ahead.first() == []


class Layer(nn.Module):
    """Shapes of several dtypes and ranks, as in a block of a transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        y = nn.DenseGeneral((2, N // 2))(nn.LayerNorm()(x))
        y = nn.DenseGeneral(N, axis=(-2, -1))(jnp.tanh(y))
        return x + nn.Dense(N, dtype=x.dtype)(y), None


class Stack(nn.Module):
    remat: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scanned = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return nn.Dense(N)(scanned()(nn.Dense(N)(x), None)[0])


class NNXStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(N, N, rngs=rngs, param_dtype="float64"))
        self.layers = make(rngs.split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(layer(x))

        return run(x, self.layers)


BATCH = np.random.default_rng(2).normal(size=(32, N))


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def create(remat: bool = True) -> TrainState:
    model = Stack(remat)
    params = model.init(jax.random.key(0), jnp.ones((1, N)))["params"]
    params = jax.tree.map(lambda x: x.astype("float64"), params)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def nnx_step(model: Any, optimizer: Any, batch: Any) -> Any:
    value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    optimizer.update(model, grads)
    return value


def zero_of(**keywords: Any) -> zerojax.Zero:
    return zerojax.zero(stage=3, stage3_param_persistence_threshold=0, **keywords)


@pytest.mark.parametrize(
    "keywords",
    swept(
        [
            {"cpu_checkpointing": True},
            {"gradient_accumulation_steps": 4},
            {},
            {"zero_hpz_partition_size": 4},
            {"mesh": zerojax.mesh(replicas=2), "gradient_accumulation_steps": 4},
            {"offload_optimizer": "cpu", "offload_param": "cpu"},
            {"overlap_comm": False},
        ]
    ),
    ids=lambda keywords: ", ".join(keywords) or "plain",
)
def test_a_training_step(keywords: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        want, losses, zero = create(), [], zero_of(small_array_size=0, **keywords)
        got = zero.init(lambda start=want: jax.tree.map(jnp.copy, start))
        step, plain = zero(train_step), jax.jit(train_step)
        for _ in range(2):
            (got, loss), (want, plain_loss) = step(got, BATCH), plain(want, BATCH)
            losses.append((loss, plain_loss))
        np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-9)
        for a, b in zip(*map(jax.tree.leaves, (got.params, want.params)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_an_nnx_scan() -> None:
    def create() -> tuple[Any, Any]:
        model = NNXStack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    with jax.enable_x64(True):
        zero = zero_of(gradient_accumulation_steps=4, small_array_size=0)
        want = create()
        got = zero.init(lambda: nnx.merge(*nnx.split(want)))
        step, plain = zero(nnx_step), nnx.jit(nnx_step)
        for _ in range(2):
            np.testing.assert_allclose(step(*got, BATCH), plain(*want, BATCH), rtol=1e-9)
        states = [jax.tree.leaves(nnx.state(model[0])) for model in (got, want)]
        for a, b in zip(*states, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
