"""A decorated step computes what the plain one computes on one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CASES, LINEN_CASES, Case
from flax import nnx

import zerojax

STAGES = (0, 1, 2, 3)
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
KEY = 5


def zero_for(stage: int, **keywords: Any) -> zerojax.Zero:
    """Shards every tensor it can, however small, unless told otherwise."""
    return zerojax.zero(stage=stage, **{"stage3_param_persistence_threshold": 0} | keywords)


def follow(case: Case, step: Callable[..., Any], state: Any, dtype: str) -> tuple[Any, ...]:
    """Runs a case. Returns the losses, the last metrics, the parameters and the other state."""
    losses = []
    for arguments in case.arguments(dtype):
        if case.nnx:
            metrics = step(*state, *arguments)
        else:
            state, metrics = step(state, *arguments)
        losses.append(float(metrics["loss"]))
    params, rest = taken_apart(case, state)
    return np.array(losses), host(metrics), host(params), host(rest)


def taken_apart(case: Case, state: Any) -> tuple[Any, Any]:
    """Parameters, and what else is carried but the optimizer's own state."""
    if case.nnx:
        _, params, rest = nnx.split(state[0], nnx.Param, ...)
        return nnx.as_pure(params), nnx.as_pure(rest)
    carried = {"step": state.step}
    carried |= {n: getattr(state, n) for n in ("batch_stats", "average", "key") if hasattr(state, n)}
    return state.params, carried


def host(tree: Any) -> Any:
    def get(x: Any) -> np.ndarray:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(get, tree)


@functools.cache
def plain(name: str, dtype: str) -> tuple[Any, ...]:
    """The undecorated step under ``jax.jit`` (``nnx.jit``) on one device."""
    case = CASES[name]
    step = nnx.jit(case.step) if case.nnx else jax.jit(case.step)
    return follow(case, step, create(case, dtype), dtype)


def create(case: Case, dtype: str) -> Any:
    jit = nnx.jit if case.nnx else jax.jit
    return jit(lambda key: case.create(key, dtype))(jax.random.key(KEY))


def assert_near(got: Any, want: Any, tolerance: float) -> None:
    """Leaf by leaf, relative to the largest element of the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert a.shape == b.shape, where
        assert a.dtype == b.dtype, where
        if not np.issubdtype(b.dtype, np.floating):
            np.testing.assert_array_equal(a, b, where)
        elif b.size:
            off = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), np.finfo(b.dtype).tiny)
            assert off <= tolerance, f"{where} is {off:.1e} off"


def assert_equal_runs(got: tuple[Any, ...], want: tuple[Any, ...], dtype: str) -> None:
    """Losses, and in float64 parameters, other state and metrics too."""
    np.testing.assert_allclose(got[0], want[0], rtol=TOLERANCE[dtype])
    if dtype == "float64":
        assert_near(got[1:], want[1:], TOLERANCE[dtype])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str, stage: int) -> None:
    """A plain state, placed when it first comes."""
    case = CASES[name]
    with jax.enable_x64(True):
        state = create(case, "float64")
        if case.nnx:
            zero = zero_for(stage)
            made = state
            state = zero.init(lambda: made)
        got = follow(case, zero_for(stage)(case.step), state, "float64")
        assert_equal_runs(got, plain(name, "float64"), "float64")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_float32(name: str, stage: int) -> None:
    """A state born sharded."""
    case, zero = CASES[name], zero_for(stage)
    state = zero.init(lambda key: case.create(key, "float32"), jax.random.key(KEY))
    got = follow(case, zero(case.step), state, "float32")
    assert_equal_runs(got, plain(name, "float32"), "float32")


AVERAGING = [name for name, case in CASES.items() if case.averages]
