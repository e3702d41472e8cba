"""Stacks that loops take layer by layer are not transposed once they are gathered."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import large_layers
from flax.training.train_state import TrainState
from jax import lax
from jaxprs import gathers

import zerojax
from zerojax.collectives import Inserter, Shard, kept
from zerojax.xla.unused import without_unused

MESH = zerojax.mesh()
LAYERS, INTO, OUT = 3, 128, 96
SPECS = [(None, "data", None), (None, None, "data")]


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w) @ w.T, None


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)


def loop(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(loss)(w, x)


def backwards(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(layer, x, w, reverse=True, unroll=3)


def in_a_call(w: jax.Array, x: jax.Array) -> Any:
    return jax.jit(loop)(w, x)


def rounded(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(lambda w: loss(w.astype(jnp.float16), x.astype(jnp.float16)))(w)


def rounded_within(w: jax.Array, x: jax.Array) -> Any:
    low = x.astype(jnp.float16)
    return lax.scan(jax.checkpoint(lambda x, w: layer(x, w.astype(x.dtype))), low, w)


def updated(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * loop(w, x), jnp.sum(w**2)


def transposed(w: jax.Array, x: jax.Array) -> Any:
    return loop(w, x), x @ w[0] @ w.transpose(0, 2, 1)[1]


def returned(w: jax.Array, x: jax.Array) -> Any:
    return loop(w, x), w


def rematerialised(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(jax.checkpoint(loss))(w, x)


MOVED = [loop, backwards, in_a_call, rounded, rounded_within, updated]
UNQUANTIZED = [transposed, returned, rematerialised]


def inserted(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    inserter = Inserter(MESH, "data", keep=True)

    def run(w: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(function)(w, x)
        given = [Shard(inserter.constrain(w, spec), spec), x]
        how = kept.decide(closed, given, kept.by_plan(given, inserter), inserter, fill=False)
        return inserter(closed, kept.gather(given, how, inserter))

    return run


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(LAYERS, INTO, OUT)) / 20
    return w.astype(np.float32), rng.normal(size=(8, INTO)).astype(np.float32)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("function", [*MOVED, *UNQUANTIZED], ids=lambda f: f.__name__)
def test_what_is_gathered(function: Callable[..., Any], spec: Any) -> None:
    order = (
        (0, 1, 2) if function in UNQUANTIZED else (spec.index("data"), 0, 3 - spec.index("data"))
    )
    shape = tuple((LAYERS, INTO, OUT)[i] for i in order)
    jaxpr = jax.make_jaxpr(inserted(function, spec))(*arguments()).jaxpr
    found = gathers(without_unused(jaxpr, lambda eqn: False))
    assert [move.shape for move in found] == [shape]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("function", [*MOVED, *UNQUANTIZED], ids=lambda f: f.__name__)
def test_what_is_inserted_is_an_identity(function: Callable[..., Any], spec: Any) -> None:
    assert exact.differing(inserted(function, spec), function, *arguments()) == []


@pytest.mark.usefixtures("quick_compile", "in_float64")
def test_micro_batches_read_them_too() -> None:
    """Stage 1 sums up once an update, each device apart from the others until then."""

    def create() -> TrainState:
        params = {"w": arguments()[0].astype(np.float64)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def step(state: TrainState, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(p["w"], x) / len(x))(state.params)
        return state.apply_gradients(grads=grads), value

    zero = zerojax.zero(stage=1, gradient_accumulation_steps=2)
    x = np.random.default_rng(1).normal(size=(16, INTO))
    want, loss_alone = jax.jit(step)(create(), x)
    lowered = zero(step).lower(state := zero.init(create), x)
    back = [line for line in lowered.as_text().splitlines() if "transpose" in line]
    assert not any(line.endswith(f"-> tensor<{LAYERS}x{INTO}x{OUT}xf64>") for line in back)
    got, found = zero(step)(state, x)
    np.testing.assert_allclose(np.mean(found), loss_alone, rtol=1e-9)
    np.testing.assert_allclose(got.params["w"], want.params["w"], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_no_stack_is_held_twice() -> None:
    """Two stacks of 16 layers at stage 2. The gradients are shards, but for the layer that is
    reduced behind; one is gathered ahead. XLA has either twice, as two iterations are one."""
    zero = zerojax.zero(stage=2, bf16=True, mesh=zerojax.topology("h100", 8))
    compiled: Any = large_layers.lowered(zero, 512, 16, rows=512, scan=True).compile()
    layer = 2 * 8 * 512**2
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < (1 + 1 / 8) * 16 * layer + 4 * layer
