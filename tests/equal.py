"""The one comparison of a decorated step with plain jit on one device.

``check("mlp", stage=3, k=4)`` runs a program of ``programs.PROGRAMS`` both ways and compares the
results of each step, the parameters and what else the state carries. What plain jit computes is
computed once a process.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import PROGRAMS, ROWS, Kind, Program

import zerojax

STEPS = 3
# How far a number may be off, relative to the largest of its array or to SMALL: what is 0 but for
# rounding (the gradient of a bias before a normalization) has no scale of its own.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
SMALL = 0.1
# A few roundings of bfloat16, of 2**-9 each, beside what the rounding of parameters makes.
BFLOAT16 = 2.0**-6

Run = tuple[Any, Any, Any]
"""Results of each step, the parameters, and what else the state carries; host arrays."""


def zero_for(stage: int = 3, k: int = 1, *, axes: Any = None, **keywords: Any) -> zerojax.Zero:
    """A ``Zero`` that shards every tensor it can, however small.

    Args:
      k: micro-batches a step.
      axes: the mesh's axes with their numbers of devices, or its number of devices; default all
        devices on one axis.
      keywords: further ones of ``zerojax.zero``.
    """
    if axes is not None:
        axes = {"data": axes} if isinstance(axes, int) else dict(axes)
        keywords["mesh"] = zerojax.mesh(math.prod(axes.values()), axes=axes)
    keywords = {"stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(stage=stage, gradient_accumulation_steps=k, **keywords)


def check(
    name: str,
    stage: int = 3,
    k: int = 1,
    *,
    axes: Any = None,
    dtype: str | None = None,
    rows: int = ROWS,
    steps: int = STEPS,
    created_by_zero: bool = False,
    **keywords: Any,
) -> None:
    """Fails where a decorated step differs from plain jit, or is not refused as its program says.

    Args:
      axes: the mesh, as of :func:`zero_for`; so ``keywords``.
      dtype: of the numbers; default the program's first.
      rows: how many of the batch's rows are taken.
      created_by_zero: the state comes from ``zero.init``; otherwise it is placed on first use.
    """
    program = PROGRAMS[name]
    dtype = dtype or program.dtypes[0]
    outcome = program.once if k == 1 else program.accumulated
    with jax.enable_x64(dtype == "float64"):
        state = start(name, "float64" if dtype == "float64" else "float32")
        if program.specs is not None:
            keywords["specs"] = program.specs(state.params)
        if dtype == "bfloat16":
            keywords["bf16"] = True
        zero = zero_for(stage, k, axes=axes, **keywords)
        if created_by_zero:
            given = state
            state = zero.init(lambda: given)

        def run() -> Run:
            step = program.step_on(zero) if program.step_on else program.step
            decorated = zero(step, **program.jit, **program.zero)
            return follow(program, decorated, state, rows, steps)

        if outcome.kind is Kind.REFUSED:
            with pytest.raises((TypeError, ValueError), match=re.escape(outcome.words)):
                run()
            return
        got = run()
        if outcome.kind is Kind.EQUAL:
            assert_same(program, got, dtype, k, rows, steps)
            return
        floats = [x for x in jax.tree.leaves(got) if np.issubdtype(x.dtype, np.floating)]
        assert all(np.isfinite(x).all() for x in floats)
        first = plain(name, dtype, rows, steps)[0][0]
        for x, want in zip(jax.tree.leaves(got[0][0]), jax.tree.leaves(first), strict=True):
            if not want.ndim and np.issubdtype(want.dtype, np.floating):
                np.testing.assert_allclose(x, want, rtol=0.5)  # other noise, but no other scale


@functools.cache
def plain(name: str, dtype: str, rows: int = ROWS, steps: int = STEPS) -> Run:
    """The undecorated step under ``jax.jit`` (``nnx.jit``) on one device."""
    program = PROGRAMS[name]
    jit: Any = nnx.jit if program.nnx else jax.jit
    state = start(name, "float32" if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        state = lowered(program, state)
    return follow(program, jit(program.step, **program.jit), state, rows, steps)


@functools.cache
def created(name: str, dtype: str) -> Any:
    """The state, of numpy's arrays but for keys; of an NNX program its graph and the rest."""
    program = PROGRAMS[name]
    with jax.core.eval_context():  # ``zero.init`` may trace the first call
        if program.nnx:
            graph, leaves = nnx.split(nnx.jit(program.create)(jax.random.key(5)))
            return graph, cast(jax.tree.map(fetched, leaves), dtype)
        return cast(jax.tree.map(fetched, jax.jit(program.create)(jax.random.key(5))), dtype)


def fetched(x: jax.Array) -> Any:
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def copied(x: Any) -> jax.Array:
    """Without a program for each shape, which takes most of a small test's time."""
    return jnp.copy(x) if isinstance(x, jax.Array) else jax.device_put(x.copy())


def start(name: str, dtype: str) -> Any:
    """The state a program starts from, on one device."""
    state = created(name, dtype)
    if PROGRAMS[name].nnx:
        graph, leaves = state
        return nnx.merge(graph, jax.tree.map(copied, leaves))
    return jax.tree.map(copied, state)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def arguments(name: str, dtype: str, steps: int = STEPS, rows: int = ROWS) -> list[tuple[Any, ...]]:
    """What the step takes beside the state, ``steps`` times; the same in each call."""
    rng, found = np.random.default_rng(0), []

    def to(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or not x.ndim:
            return x
        x = x[:rows] if len(x) == ROWS else x
        return x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x

    for _ in range(steps):
        found.append(jax.tree.map(to, PROGRAMS[name].batch(rng)))
    return found


def follow(
    program: Program, step: Callable[..., Any], state: Any, rows: int = ROWS, steps: int = STEPS
) -> Run:
    """Runs a program for some steps."""
    results = []
    for given in arguments(program.name, jax.dtypes.canonicalize_dtype(float).name, steps, rows):
        if program.call is not None:
            state, out = program.call(step, state, given)
        elif program.nnx:
            out = step(*state, *given)
        else:
            state, out = step(state, *given)
        results.append(host(out))
    return results, *map(host, taken_apart(program, state))


def lowered(program: Program, state: Any) -> Any:
    """The state with parameters in bfloat16, and masters in that of its optimizer."""
    if not program.nnx:
        tx = with_masters(state.tx)
        return state.replace(
            params=cast(state.params, jnp.bfloat16), tx=tx, opt_state=tx.init(state.params)
        )
    model = next(x for x in state if is_model(x))
    (old,) = (x for x in state if isinstance(x, nnx.Optimizer))
    optimizer = nnx.Optimizer(model, with_masters(old.tx), wrt=nnx.Param)
    nnx.update(model, cast(nnx.state(model, nnx.Param), jnp.bfloat16))
    return tuple(optimizer if x is old else x for x in state)


def with_masters(tx: Any) -> Any:
    """Mixed precision written by hand: masters and the update in float32."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.copy, params), tx.init(params)

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        masters, inner = state
        updates, inner = tx.update(cast(grads, jnp.float32), inner, masters, **extra)
        masters = optax.apply_updates(masters, updates)
        return jax.tree.map(lambda m, p: m - p.astype(m.dtype), masters, params), (masters, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def is_model(x: Any) -> bool:
    return isinstance(x, nnx.Module) and not isinstance(x, nnx.Optimizer | nnx.Rngs | nnx.Metric)


def taken_apart(program: Program, state: Any) -> tuple[Any, Any]:
    """Parameters (their masters in the run by hand), and what else is carried but the optimizer's
    own state."""
    if not program.nnx and not hasattr(state, "opt_state"):
        return jax.tree.leaves(state), ()
    if not program.nnx:
        by_hand = isinstance(state.opt_state, tuple) and is_low(state.params)
        params = state.opt_state[0] if by_hand else state.params
        known = ("params", "opt_state", "tx", "apply_fn")
        return params, {name: x for name, x in vars(state).items() if name not in known}
    model = next(x for x in state if is_model(x))
    (optimizer,) = (x for x in state if isinstance(x, nnx.Optimizer))
    params, rest = map(nnx.as_pure, nnx.state(model, nnx.Param, ...))
    if is_low(params):
        params = nnx.as_pure(nnx.state(optimizer).opt_state)[0]
    others = [nnx.as_pure(nnx.state(x)) for x in state if x is not model and x is not optimizer]
    return params, (rest, optimizer.step[...], others)


def is_low(params: Any) -> bool:
    return jax.tree.leaves(params)[0].dtype == jnp.bfloat16


def host(tree: Any) -> Any:
    def get(x: Any) -> np.ndarray:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(get, tree)


def by_micro_batch(results: Any, k: int, rows: int = ROWS) -> Any:
    """Stacks what has a row for each of the batch by micro-batch."""
    return jax.tree.map(
        lambda x: x.reshape(k, -1, *x.shape[1:]) if x.ndim and len(x) == rows and k > 1 else x,
        results,
    )


def assert_same(
    program: Program, got: Run, dtype: str, k: int = 1, rows: int = ROWS, steps: int = STEPS
) -> None:
    """Compares a run with plain jit's."""
    results, params, rest = plain(program.name, dtype, rows, steps)
    if dtype != "bfloat16":
        near = (k > 1 and program.near) or TOLERANCE[dtype]
        assert_near(got, (by_micro_batch(results, k, rows), params, rest), near)
        return
    exact = plain(program.name, "float32", rows, steps)
    by_batch = by_micro_batch(results, k, rows), by_micro_batch(exact[0], k, rows)
    assert_rounded(got[0], *by_batch, BFLOAT16)
    assert_rounded(got[2], rest, exact[2], BFLOAT16)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(got[1]))
    off = np.linalg.norm(flat(got[1]) - flat(params))
    rounding = np.linalg.norm(flat(params) - flat(exact[1]))
    assert off <= 2 * rounding, (off, rounding)


def assert_near(got: Any, want: Any, tolerance: float) -> None:
    """Leaf by leaf, relative to the largest element of the leaf, or to ``SMALL``."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if not np.issubdtype(b.dtype, np.floating):
            np.testing.assert_array_equal(a, b, where)
        elif b.size:
            off = furthest(a, b) / max(np.max(np.abs(b)), SMALL)
            assert off <= tolerance, f"{where} is {off:.1e} off: {a} is to be {b}"


def assert_rounded(got: Any, want: Any, exact: Any, floor: float) -> None:
    """No farther from the run by hand than three times what rounding moves that one from the run
    in float32, and not more than roundings of the number itself."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree.leaves(want),
        jax.tree.leaves(exact),
        strict=True,
    )
    for (path, a), b, c in pairs:
        if jnp.issubdtype(b.dtype, jnp.floating) and b.size:
            a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
            off, allowed = furthest(a, b), 3 * furthest(b, c) + floor * np.max(np.abs(b))
            assert off <= allowed, f"{jax.tree_util.keystr(path)}: {off:.1e} off, not {allowed:.1e}"


def furthest(a: np.ndarray, b: np.ndarray) -> Any:
    """The largest distance between two elements; infinities may be equal."""
    with np.errstate(invalid="ignore"):
        return np.max(np.where(a == b, 0, np.abs(a - b)))


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x, np.float32)) for x in jax.tree.leaves(tree)])
