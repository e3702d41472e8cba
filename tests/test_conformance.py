"""Programs as users write them: the numbers of plain jit on the whole batch, or words."""

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import PROGRAMS, ROWS, Kind, Program

import zerojax
from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS = 3
# What a number may be off by, relative to the largest of its array, or to SMALL: what is 0 by
# nature (a bias before a normalization) is rounding alone.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
SMALL = 0.1
# A few roundings of bfloat16, of 2**-9 each, beside what the rounding of parameters makes.
BFLOAT16 = 2.0**-6


def cells() -> Iterator[Any]:
    """Program, stage, micro-batches and dtype: every program at stage 3, half of them whole and
    half by micro-batch at another stage, and the other half in bfloat16 at stage 0 or 3. Core is
    one of them for each program, under accumulation."""
    for i, (name, program) in enumerate(PROGRAMS.items()):
        for k in (1, 4):
            more = i % 2 == k // 4
            runs = [(3, program.dtypes[0])]
            if more:
                runs.append((i // 2 % 3, program.dtypes[0]))
            elif "bfloat16" in program.dtypes:
                runs.append((i // 2 % 2 * 3, "bfloat16"))
            for at, (stage, dtype) in enumerate(runs):
                core = k == 4 and at == (i // 2 % 2 if more else 0)
                marks = () if core else pytest.mark.sweep
                where = f"{name}-stage{stage}-by{k}-{dtype}"
                yield pytest.param(name, stage, k, dtype, marks=marks, id=where)


@functools.cache
def plain(name: str, dtype: str) -> tuple[Any, Any, Any]:
    """The undecorated step under ``jax.jit`` (``nnx.jit``) on one device."""
    program = PROGRAMS[name]
    jit: Any = nnx.jit if program.nnx else jax.jit
    step = jit(program.step, **program.jit)
    state = start(name, "float32" if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        state = lowered(program, state)
    return follow(program, step, state)


@functools.cache
def made(name: str, dtype: str) -> Any:
    program = PROGRAMS[name]
    if program.nnx:
        graph, leaves = nnx.split(nnx.jit(program.create)(jax.random.key(5)))
        return graph, cast(leaves, dtype)
    return cast(jax.jit(program.create)(jax.random.key(5)), dtype)


def start(name: str, dtype: str) -> Any:
    """The state a program starts from, on one device."""
    program = PROGRAMS[name]
    if program.nnx:
        graph, leaves = made(name, dtype)
        return nnx.merge(graph, jax.tree.map(jnp.copy, leaves))
    return jax.tree.map(jnp.copy, made(name, dtype))


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


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


def follow(program: Program, step: Callable[..., Any], state: Any) -> tuple[Any, Any, Any]:
    """Runs a program. Returns each step's results, the parameters and what else the state has."""
    rng, results = np.random.default_rng(0), []
    for _ in range(STEPS):
        arguments = cast_arrays(program.batch(rng), jax.dtypes.canonicalize_dtype(float))
        if program.call is not None:
            state, out = program.call(step, state, arguments)
        elif program.nnx:
            out = step(*state, *arguments)
        else:
            state, out = step(state, *arguments)
        results.append(host(out))
    return results, *map(host, taken_apart(program, state))


def cast_arrays(arguments: Any, dtype: Any) -> Any:
    def to(x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)
        return x.astype(dtype) if floating else x

    return jax.tree.map(to, arguments)


def is_model(x: Any) -> bool:
    return isinstance(x, nnx.Module) and not isinstance(x, nnx.Optimizer | nnx.Rngs | nnx.Metric)


def taken_apart(program: Program, state: Any) -> tuple[Any, Any]:
    """Parameters (their masters in the run by hand), and what else is carried but the optimizer's
    own state."""
    if not program.nnx:
        by_hand = isinstance(state.opt_state, tuple) and is_by_hand(state.opt_state, state.params)
        params = state.opt_state[0] if by_hand else state.params
        rest = {
            name: x
            for name, x in vars(state).items()
            if name not in ("params", "opt_state", "tx", "apply_fn")
        }
        return params, rest
    model = next(x for x in state if is_model(x))
    (optimizer,) = (x for x in state if isinstance(x, nnx.Optimizer))
    params, rest = map(nnx.as_pure, nnx.state(model, nnx.Param, ...))
    if is_by_hand(optimizer.opt_state, params):
        params = nnx.as_pure(nnx.state(optimizer).opt_state)[0]
    others = [nnx.as_pure(nnx.state(x)) for x in state if x is not model and x is not optimizer]
    return params, (rest, optimizer.step[...], others)


def is_by_hand(opt_state: Any, params: Any) -> bool:
    return jax.tree.leaves(params)[0].dtype == jnp.bfloat16


def host(tree: Any) -> Any:
    def get(x: Any) -> np.ndarray:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(get, tree)


def by_micro_batch(results: Any, k: int) -> Any:
    """What has a row for each of the batch comes stacked by micro-batch."""
    return jax.tree.map(
        lambda x: x.reshape(k, -1, *x.shape[1:]) if x.ndim and len(x) == ROWS and k > 1 else x,
        results,
    )


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


def assert_same(program: Program, got: Any, dtype: str, k: int) -> None:
    results, params, rest = plain(program.name, dtype)
    if dtype != "bfloat16":
        assert_near(got, (by_micro_batch(results, k), params, rest), TOLERANCE[dtype])
        return
    exact = plain(program.name, "float32")
    assert_rounded(got[0], by_micro_batch(results, k), by_micro_batch(exact[0], k), BFLOAT16)
    assert_rounded(got[2], rest, exact[2], BFLOAT16)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(got[1]))
    off = np.linalg.norm(flat(got[1]) - flat(params))
    rounding = np.linalg.norm(flat(params) - flat(exact[1]))
    assert off <= 2 * rounding, (off, rounding)


@pytest.mark.parametrize(("name", "stage", "k", "dtype"), list(cells()))
def test_program(
    name: str, stage: int, k: int, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = PROGRAMS[name]
    outcome = program.once if k == 1 else program.accumulated
    zero = zerojax.zero(
        stage=stage, stage3_param_persistence_threshold=0, gradient_accumulation_steps=k,
        bf16=dtype == "bfloat16",
    )  # fmt: skip
    with jax.enable_x64(dtype == "float64"), caplog.at_level(logging.INFO, "zerojax"):
        state = start(name, "float64" if dtype == "float64" else "float32")

        def run() -> Any:
            step = zero(program.step, **program.jit, **program.zero)
            return follow(program, step, state)

        if outcome.kind is Kind.REFUSED:
            with pytest.raises((TypeError, ValueError), match=re.escape(outcome.words)):
                run()
            return
        got = run()
        lines = [record.getMessage() for record in caplog.records if record.name == "zerojax"]
        if outcome.kind is Kind.TOLD:
            assert sum(outcome.words in line for line in lines) == 1, lines
            floats = [x for x in jax.tree.leaves(got) if np.issubdtype(x.dtype, np.floating)]
            assert all(np.isfinite(x).all() for x in floats)
            return
        assert_same(program, got, dtype, k)


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.sweep), 4])
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("gan_simultaneous", 3),
        ("gan_simultaneous", 1),
        ("mean_teacher", 3),
        pytest.param("gan_weighted", 3, marks=pytest.mark.sweep),
        pytest.param("early_average", 3, marks=pytest.mark.sweep),
        ("target_copied", 2),
        pytest.param("target_periodic", 3, marks=pytest.mark.sweep),
        ("batch_norm", 3),
        ("nnx_batch_norm", 3),
    ],
)
def test_state_beside_the_parameters_is_sharded(
    name: str, stage: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays as small as these too."""
    program = PROGRAMS[name]
    if k > 1 and program.accumulated.kind is not Kind.EQUAL:
        k = 1
    monkeypatch.setattr(rule, "SMALL", 0)
    zero = zerojax.zero(
        stage=stage, stage3_param_persistence_threshold=0, gradient_accumulation_steps=k
    )
    with jax.enable_x64(True):
        state = start(name, "float64")
        assert any(leaf.sharded for leaf in zero.plan(state).leaves["rest"])
        got = follow(program, zero(program.step, **program.jit, **program.zero), state)
        assert_same(program, got, "float64", k)


def test_batch_statistics_of_micro_batches() -> None:
    """The gradient is the mean of those that micro-batches have with their own statistics, which
    pass from one to the next."""
    program = PROGRAMS["batch_norm"]
    (batch,) = program.batch(np.random.default_rng(0))
    with jax.enable_x64(True):
        want = start("batch_norm", "float64")
        stats, gradients = want.batch_stats, []
        for rows in np.split(np.arange(ROWS), 4):

            def loss_fn(params: Any, rows: Any = rows, stats: Any = stats) -> Any:
                variables = {"params": params, "batch_stats": stats}
                logits, new = want.apply_fn(variables, batch["x"][rows], mutable=["batch_stats"])
                label = batch["label"][rows]
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
                return losses.mean(), new["batch_stats"]

            grads, stats = jax.grad(loss_fn, has_aux=True)(want.params)
            gradients.append(grads)
        mean = jax.tree.map(lambda *x: sum(x) / 4, *gradients)
        want = want.apply_gradients(grads=mean, batch_stats=stats)
        zero = zerojax.zero(
            stage=3, stage3_param_persistence_threshold=0, gradient_accumulation_steps=4
        )
        got, _ = zero(program.step)(start("batch_norm", "float64"), batch)
        assert_near(*(host((x.params, x.batch_stats)) for x in (got, want)), TOLERANCE["float64"])
