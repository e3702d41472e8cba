"""A decorated step computes what the plain one computes on one device."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CASES, PARTITIONED, Case, megatron_specs
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax
from zerojax.models.gpt import loss_fn as cross_entropy
from zerojax.plan import layout, rule

pytestmark = pytest.mark.usefixtures("quick_compile")

P = PartitionSpec
STAGES = (0, 1, 2, 3)
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
ALL = CASES | PARTITIONED

# Without accumulation stages 1 and 2 are one program, as tests/benchmarks/test_memory.py shows.
WHOLE = (0, 2, 3)

# These take seconds to compile. The variants of a GPT differ in the forward pass alone, so not
# all of them go through all stages.
SLOW = {name for name in CASES if "gpt" in name or name == "convnet"}
SOME_STAGES = dict.fromkeys(SLOW - {"convnet", "gpt_scan_remat", "nnx_gpt"}, (3,)) | dict.fromkeys(
    ("momentum", "contrastive", "key_in_state", "frozen", "masked_decay", "jitted", "nnx_momentum"),
    (1, 3),
) | {"mlp": STAGES}  # fmt: skip
SINGLE = (
    "mlp", "gpt_dropout", "gpt_remat", "gpt_scan", "gpt_scan_remat", "convnet", "has_aux",
    "masked", "tied", "odd", "nnx_mlp", "nnx_gpt",
)  # fmt: skip


# Stage 3, where all is sharded, stands for the others, and two GPTs for the rest of them, but in
# the sweep.
EACH_STAGE = [*(pytest.param(stage, marks=pytest.mark.sweep) for stage in STAGES[:-1]), 3]
COMMON = {*CASES} - SLOW | {"gpt_scan_remat", "nnx_gpt_dropout"}


def each(
    names: Iterable[str],
    stages: Callable[[str], tuple[int, ...]],
    common: Iterable[str] = COMMON,
) -> Any:
    """Parametrizes a test over cases and their stages. An MLP, and stage 3 of the ``common``
    cases, are no part of the sweep."""

    def marks(name: str, stage: int) -> Any:
        return () if name == "mlp" or (stage == 3 and name in common) else pytest.mark.sweep

    return pytest.mark.parametrize(
        ("name", "stage"),
        [
            pytest.param(name, stage, marks=marks(name, stage))
            for name in names
            for stage in stages(name)
        ],
    )


def zero_for(stage: int, **keywords: Any) -> zerojax.Zero:
    """Shards every tensor it can, however small, unless told otherwise."""
    return zerojax.zero(stage=stage, **{"stage3_param_persistence_threshold": 0} | keywords)


@functools.cache
def made(name: str, dtype: str) -> Any:
    case = ALL[name]
    jit = nnx.jit if case.nnx else jax.jit
    state = jit(lambda key: case.create(key, dtype))(jax.random.key(5))
    return nnx.split(state) if case.nnx else state


def start(name: str, dtype: str) -> Any:
    """The state a case starts from, on one device."""
    state = jax.tree.map(lambda x: x.copy(), made(name, dtype))
    return nnx.merge(*state) if ALL[name].nnx else state


def follow(name: str, step: Callable[..., Any], state: Any, dtype: str) -> tuple[Any, ...]:
    """Runs a case. Returns the losses, the last metrics, the parameters and the other state."""
    case, losses = ALL[name], []
    for arguments in case.arguments(dtype):
        if case.nnx:
            metrics = step(*state, *arguments)
        else:
            state, metrics = step(state, *arguments)
        losses.append(float(metrics["loss"]))
    return np.array(losses), host(metrics), *map(host, taken_apart(case, state))


def taken_apart(case: Case, state: Any) -> tuple[Any, Any]:
    """Parameters, and what else is carried but the optimizer's own state."""
    if case.nnx:
        _, params, rest = nnx.split(state[0], nnx.Param, ...)
        return nnx.as_pure(params), nnx.as_pure(rest)
    names = ("step", "batch_stats", "average", "key")
    return state.params, {name: getattr(state, name) for name in names if hasattr(state, name)}


def host(tree: Any) -> Any:
    def get(x: Any) -> np.ndarray:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(get, tree)


@functools.cache
def plain(name: str, dtype: str) -> tuple[Any, ...]:
    """The undecorated step under ``jax.jit`` (``nnx.jit``) on one device."""
    jit = nnx.jit if ALL[name].nnx else jax.jit
    return follow(name, jit(ALL[name].step), start(name, dtype), dtype)


def assert_near(got: Any, want: Any, tolerance: float) -> None:
    """Leaf by leaf, relative to the largest element of the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
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


@each(CASES, lambda name: SOME_STAGES.get(name, WHOLE))
def test_float64(name: str, stage: int) -> None:
    """A plain state, placed when it first comes."""
    with jax.enable_x64(True):
        step = zero_for(stage)(CASES[name].step)
        got = follow(name, step, start(name, "float64"), "float64")
        assert_equal_runs(got, plain(name, "float64"), "float64")


@pytest.mark.usefixtures("full_compile")
@pytest.mark.parametrize("stage", STAGES)
def test_under_xlas_default_optimizations(stage: int) -> None:
    with jax.enable_x64(True):
        step = zero_for(stage, gradient_accumulation_steps=4)(CASES["mlp"].step)
        got = follow("mlp", step, start("mlp", "float64"), "float64")
        np.testing.assert_allclose(got[0], plain("mlp", "float64")[0], rtol=TOLERANCE["float64"])
        assert_near(got[2:], plain("mlp", "float64")[2:], TOLERANCE["float64"])


@each(SINGLE, lambda name: (3,) if name in SLOW else WHOLE, ("nnx_mlp",))
def test_float32(name: str, stage: int) -> None:
    """A state born sharded."""
    zero, state = zero_for(stage), start(name, "float32")
    state = zero.init(lambda: state)
    got = follow(name, zero(CASES[name].step), state, "float32")
    assert_equal_runs(got, plain(name, "float32"), "float32")


@each(
    [name for name, case in CASES.items() if case.averages],
    lambda name: STAGES if name in ("mlp", "nnx_mlp") else (2, 3),
    ("nnx_mlp", "has_aux", "gpt_scan_remat"),
)
def test_accumulation_by_four(name: str, stage: int) -> None:
    """Numbers are averaged, arrays of a row each come stacked by micro-batch."""
    with jax.enable_x64(True):
        step = zero_for(stage, gradient_accumulation_steps=4)(CASES[name].step)
        losses, metrics, *state = follow(name, step, start(name, "float64"), "float64")
        want_losses, want_metrics, *want_state = plain(name, "float64")
        want_metrics = jax.tree.map(
            lambda x: x.reshape(4, -1, *x.shape[1:]) if x.ndim else x, want_metrics
        )
        assert_equal_runs(
            (losses, metrics, *state), (want_losses, want_metrics, *want_state), "float64"
        )


@pytest.mark.parametrize(
    ("name", "partition", "accumulation"),
    [
        ("mlp", 2, 1),
        ("mlp", 4, 4),
        ("tied", 2, 1),
        ("nnx_mlp", 2, 1),
        ("gpt_scan_remat", 4, 4),
        pytest.param("gpt_remat", 2, 1, marks=pytest.mark.sweep),
        pytest.param("nnx_gpt", 4, 4, marks=pytest.mark.sweep),
        pytest.param("convnet", 2, 1, marks=pytest.mark.sweep),
    ],
)
def test_secondary_shards(
    name: str, partition: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hpZ, of parameters as small as these too."""
    monkeypatch.setattr(rule, "SMALL", 0)
    zero = zero_for(3, zero_hpz_partition_size=partition, gradient_accumulation_steps=accumulation)
    with jax.enable_x64(True):
        assert zero.plan(start(name, "float64")).secondary()
        got = follow(name, zero(CASES[name].step), start(name, "float64"), "float64")
        want = plain(name, "float64")
        if accumulation > 1:
            got, want = (got[0], *got[2:]), (want[0], *want[2:])  # metrics come by micro-batch
        assert_equal_runs(got, want, "float64")


@pytest.mark.parametrize(
    ("devices", "partition", "shape", "spec"),
    [
        (8, 4, (12, 7), P("data:(2)4", "data:(1)2")),
        (6, 2, (7, 10), P("data:(1)3", "data:(3)2")),
        (6, 3, (8, 9), P("data:(1)2", "data:(2)3")),
        (8, 4, (7, 5), None),  # nothing divides: no secondary shard, which the plan says
    ],
)
def test_secondary_shards_of_padded_arrays(
    devices: int, partition: int, shape: Any, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "SMALL", 0)
    rng = np.random.default_rng(0)

    def create() -> TrainState:
        params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=shape))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def step(state: TrainState, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    with jax.enable_x64(True):
        zero = zero_for(3, mesh=zerojax.mesh(devices), zero_hpz_partition_size=partition)
        state, want = zero.init(create), create()
        plan = zero.plan(state)
        assert [leaf.spec for leaf in plan.leaves["params"]] == [spec or plan.params["w"]]
        assert len(plan.secondary()) == bool(spec)
        assert ("have no secondary shard" in str(plan)) != bool(spec)
        batches = rng.normal(size=(3, 2 * devices, shape[0]))
        one, plain_one = zero(step), jax.jit(step)
        for batch in batches:
            state, loss = one(state, batch)
            want, plain_loss = plain_one(want, batch)
            np.testing.assert_allclose(loss, plain_loss, rtol=1e-9)
        np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-9)
        evaluated = zero.evaluate(lambda state, x: x @ state.params["w"])(state, batches[0])
        np.testing.assert_allclose(evaluated, batches[0] @ want.params["w"], rtol=1e-9)


# Of three layers, bias before kernel. A bias whose one dimension "model" cuts is cut again.
BOTH = ("model", "data")
USERS = [P("model"), P(None, "model"), P(), P("model"), P("model"), P(None, "model")]
USERS_AND_ZEROS = [
    P(BOTH), P("data", "model"), P("data"), P("model", "data"), P(BOTH), P("data", "model"),
]  # fmt: skip


@pytest.mark.parametrize("stage", EACH_STAGE)
@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("partitioned", 1),
        ("partitioned", 4),
        ("logical", 1),
        ("nnx_partitioned", 1),
        ("nnx_partitioned", 4),
    ],
)
def test_users_own_specs_in_the_model(name: str, accumulation: int, stage: int) -> None:
    """The plan keeps "model" where the model put it, and ZeRO takes another dimension."""
    zero = zero_for(
        stage, mesh=zerojax.mesh(axes={"data": 2, "model": 4}),
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    with jax.enable_x64(True):
        state = start(name, "float64")
        specs = jax.tree.leaves(zero.plan(state).params, is_leaf=is_spec)
        assert specs == (USERS if stage == 0 else USERS_AND_ZEROS)
        got = follow(name, zero(PARTITIONED[name].step), state, "float64")
        assert_equal_runs(got, plain(name, "float64"), "float64")


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


@each(["gpt", "gpt_scan_remat"], lambda name: (2, 3) if name == "gpt" else (3,))
def test_users_own_specs_given(name: str, stage: int) -> None:
    with jax.enable_x64(True):
        state = start(name, "float64")
        specs = megatron_specs(state.params)
        zero = zero_for(stage, mesh=zerojax.mesh(axes={"data": 2, "model": 4}), specs=specs)
        planned = jax.tree.leaves(zero.plan(state).params, is_leaf=is_spec)
        for mine, spec in zip(jax.tree.leaves(specs, is_leaf=is_spec), planned, strict=True):
            n = max(len(mine), len(spec))
            assert layout.without(layout.full(spec, n), "data") == layout.full(mine, n)
        got = follow(name, zero(CASES[name].step), state, "float64")
        assert_equal_runs(got, plain(name, "float64"), "float64")


def test_small_tensors_left_whole() -> None:
    """Under the default threshold stage 3 shards nothing of a model as small as this."""
    zero = zerojax.zero(stage=3)
    state = start("mlp", "float32")
    assert not any(leaf.sharded for leaf in zero.plan(state).leaves["params"])
    got = follow("mlp", zero(CASES["mlp"].step), state, "float32")
    assert_equal_runs(got, plain("mlp", "float32"), "float32")


@pytest.mark.parametrize("devices", [1, 2])
def test_fewer_devices(devices: int) -> None:
    zero = zero_for(3, mesh=zerojax.mesh(devices))
    got = follow("mlp", zero(CASES["mlp"].step), start("mlp", "float32"), "float32")
    assert_equal_runs(got, plain("mlp", "float32"), "float32")


def regression_loss(apply: Any, params: Any, batch: Any) -> jax.Array:
    return jnp.mean((apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def language_loss(apply: Any, params: Any, tokens: Any, key: Any) -> jax.Array:
    del key
    return cross_entropy(apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])


@pytest.mark.parametrize("stage", EACH_STAGE)
@pytest.mark.parametrize(
    ("name", "loss"), [("momentum", regression_loss), ("gpt_scan_remat", language_loss)]
)
def test_bfloat16(name: str, loss: Callable[..., jax.Array], stage: int) -> None:
    """Against mixed precision written by hand: bfloat16 compute, float32 masters and moments."""

    def low(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    @jax.jit
    def by_hand(state: Any, *arguments: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(state.apply_fn, p, *arguments))(
            low(state.params)
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return state.apply_gradients(grads=grads), {"loss": value}

    seen = set()

    def watched(state: Any, *arguments: Any) -> Any:
        seen.update(x.dtype for x in jax.tree.leaves(state.params))
        new, metrics = CASES[name].step(state, *arguments)
        seen.update(x.dtype for x in jax.tree.leaves(new.params))
        return new, metrics

    want = follow(name, by_hand, start(name, "float32"), "float32")
    zero, state = zero_for(stage, bf16=True), start(name, "float32")
    state = zero.init(lambda: state)
    got = follow(name, zero(watched), state, "float32")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2)
    # Two runs that are rounded independently lie sqrt(2) times as far apart as each does from
    # the run in float32.
    off = optax.tree.norm(jax.tree.map(np.subtract, got[2], want[2]))
    rounding = optax.tree.norm(jax.tree.map(np.subtract, want[2], plain(name, "float32")[2]))
    assert off < math.sqrt(2) * rounding, (off, rounding)
    assert rounding < 2e-2 * optax.tree.norm(want[2])
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(got[2]))
    assert seen == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_accumulated_in_float32() -> None:
    """Many small gradients after a large one would vanish in a bfloat16 sum."""

    def step(state: TrainState, rows: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jnp.sum(params["w"] * rows.astype(jnp.bfloat16), axis=-1))

        grads = jax.grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {}

    zero = zero_for(2, bf16=True, gradient_accumulation_steps=64)
    params = {"w": np.zeros(8, np.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    rows = np.full((512, 8), 2.0**-9, np.float32)
    rows[:8] = 1.0
    state, _ = zero(step)(state, rows)
    np.testing.assert_allclose(state.params["w"], -rows.mean(0), rtol=1e-6)
