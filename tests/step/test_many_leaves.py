"""Many small parameters: collectives and Python work do not grow with their number."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.slow

ROWS, WIDTH = 16, 8


def creating(leaves: int) -> Callable[[jax.Array], TrainState]:
    """``create_state(key)`` with so many parameters of ``WIDTH`` elements."""

    def create(key: jax.Array) -> TrainState:
        params = {f"p{i:04}": jnp.full((WIDTH,), 1 + i / 1e4) for i in range(leaves)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    return create


def step(state: TrainState, x: Any) -> tuple[TrainState, Any]:
    def loss(params: Any) -> jax.Array:
        return sum((jnp.mean((x @ p - 1) ** 2) for p in params.values()), start=jnp.zeros(()))

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value}


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_few_collectives_on_gpus() -> None:
    """One gather and one reduce-scatter, of the theory's bytes, and the norm."""
    leaves = 60
    mesh = zerojax.topology("h100", 8)
    zero = zero_for(3, mesh=mesh)
    state = zero.abstract_state(creating(leaves), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    text = zero(step).lower(state, batch).compile().as_text() or ""
    found = Counter(each.kind for each in collectives(text))
    assert found["all-gather"] == found["reduce-scatter"] == 1
    assert sum(found.values()) <= 4
    once = leaves * WIDTH * 4 * 7 // 8
    moved = {each.kind: each.moved_bytes for each in collectives(text)}
    assert moved["all-gather"] == moved["reduce-scatter"] == once


@pytest.mark.usefixtures("quick_compile")
def test_a_call_does_no_python_work_for_a_leaf() -> None:
    """24 more leaves take fewer than 24 more calls of Python functions, once it is compiled: a few
    depend on whether the device is done with an earlier step."""
    assert abs(calls(30) - calls(6)) < 24


def calls(leaves: int) -> int:
    """Counts the Python functions that a step on a ``TrainState`` calls."""
    zero = zerojax.zero(stage=1)
    state: Any = zero.init(creating(leaves), jax.random.key(0))
    decorated, x = zero(step), np.ones((ROWS, WIDTH), "f4")
    for _ in range(3):
        state, _ = decorated(state, x)
    jax.block_until_ready(state)  # the host looks at a step once the device is done with it
    return counted(lambda: decorated(state, x))


@pytest.mark.usefixtures("quick_compile")
def test_a_call_does_little_for_a_variable() -> None:
    """24 more parameters are 72 more variables; each takes at most 5 calls of Python functions, a
    tenth of those under ``nnx.jit``."""
    mine, plain = (nnx_calls(30, way) - nnx_calls(6, way) for way in ("zero", "nnx.jit"))
    assert 0 < mine <= 5 * 72
    assert mine <= plain / 10


def nnx_calls(leaves: int, way: str) -> int:
    """Counts the Python functions that a step on an NNX model and its optimizer calls."""

    def make() -> tuple[Any, ...]:
        model = nnx.List([nnx.Param(jnp.ones(WIDTH)) for _ in range(leaves)])
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            return sum(jnp.mean((x @ p[...]) ** 2) for p in model)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    zero, x = zerojax.zero(stage=1), np.ones((ROWS, WIDTH), "f4")
    objects: Any = zero.init(make) if way == "zero" else make()
    run: Any = zero(step) if way == "zero" else nnx.jit(step)
    for _ in range(3):
        run(*objects, x)
    return counted(lambda: run(*objects, x))


def counted(call: Callable[[], Any]) -> int:
    """Counts the Python functions that a call calls."""
    names: list[str] = []

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "gc_callback" not in frame.f_code.co_name:
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(names)
