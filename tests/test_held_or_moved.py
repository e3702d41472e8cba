"""What is neither held nor moved without need, small: the numbers of plain jit, linen and NNX."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile", "all_are_large")

ROWS, WIDTH, WIDE, WORDS = 32, 16, 32, 512
"""Rows of a batch; the words of a table are many more."""
STEPS = 3
Grad = Callable[..., Any]
"""``jax.value_and_grad``, or zerojax's own."""


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise parameters as small as these are gathered together."""
    monkeypatch.setattr(rule, "SMALL", 0)


def net(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["into"].astype(x.dtype)) @ p["out"].astype(x.dtype)


def error(out: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((out - y.astype(out.dtype)).astype(y.dtype) ** 2)


def taught(p: Any, extra: Any, b: Any) -> jax.Array:
    """Beside a frozen base and a copy of the parameters."""
    teacher = jax.lax.stop_gradient(net(extra["copy"], b["x"]))
    return error(net(p, net(extra["base"], b["x"])), b["y"]) + error(net(p, b["x"]), teacher)


def looked_up(p: Any, extra: Any, b: Any) -> jax.Array:
    return error(net(p, p["words"][b["ids"]]), b["y"])


def narrow(w: Any) -> Any:
    return w.astype({"float64": "float32", "float32": "float16"}.get(str(w.dtype), w.dtype))


def rounded(p: Any, extra: Any, b: Any) -> jax.Array:
    """A table that is rounded before each use, and transposed for one; wide again for the head."""
    x = net({name: narrow(p[name]) for name in ("into", "out")}, b["x"])
    return error(x @ narrow(p["words"]).astype(x.dtype).T, jnp.tile(b["y"], (1, WORDS // WIDTH)))


def tied(p: Any, extra: Any, b: Any) -> jax.Array:
    """Two products with one table."""
    x = jax.nn.softmax(jnp.tile(b["x"], (1, WORDS // WIDTH))) @ p["words"]
    return error((x + net(p, x)) @ p["words"].T, jnp.tile(b["y"], (1, WORDS // WIDTH)))


def plainly(loss: Any) -> Any:
    """From ``grad, p, extra, b`` to value and gradients."""
    return lambda grad, p, extra, b: grad(lambda p: loss(p, extra, b))(p)


def curved(grad: Grad, p: Any, extra: Any, b: Any) -> Any:
    """A gradient and its product with the Hessian."""
    first = jax.grad(lambda p: tied(p, extra, b))(p)

    def along(p: Any) -> jax.Array:
        moved = jax.jvp(lambda p: tied(p, extra, b), (p,), (jax.lax.stop_gradient(first),))
        return moved[0] + 0.1 * moved[1]

    return grad(along)(p)


def penalized(grad: Grad, p: Any, extra: Any, b: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        value, grads = jax.value_and_grad(lambda p: tied(p, extra, b))(p)
        return value + 0.1 * optax.tree.norm(grads, squared=True)

    return grad(loss)(p)


def chosen(x: jax.Array, into: jax.Array, out: jax.Array) -> jax.Array:
    """[rows, D], one of the experts [E, D, F], [E, F, D] for each row -> [rows, D]."""
    which = jnp.floor(jnp.abs(10 * x[:, 0])).astype(jnp.int32) % len(into)
    order, sizes = jnp.argsort(which), jnp.bincount(which, length=len(into))
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], into.astype(x.dtype), sizes))
    done = jax.lax.ragged_dot(hidden, out.astype(x.dtype), sizes)
    return jnp.zeros_like(x).at[order].set(done)


def expert(per_device: Callable[..., Any], grad: Grad, p: Any, extra: Any, b: Any) -> Any:
    apart = per_device(chosen, whole=[1, 2])
    return grad(lambda p: error(apart(b["x"], p["experts_in"], p["experts_out"]), b["y"]))(p)


@dataclass(frozen=True)
class Case:
    """Value and gradients of a step, the names of its parameters, and which of them move."""

    gradients: Any
    names: tuple[str, ...] = ("into", "out")
    moves: tuple[str, ...] | None = None


CASES = {
    "extra state": Case(plainly(taught)),
    "lookups": Case(plainly(looked_up), ("into", "out", "words")),
    "rounded": Case(plainly(rounded), ("into", "out", "words")),
    "frozen": Case(plainly(tied), ("into", "out", "words"), moves=("out",)),
    "used twice": Case(plainly(tied), ("into", "out", "words")),
    "curved": Case(curved, ("into", "out", "words")),
    "penalized": Case(penalized, ("into", "out", "words")),
    "experts": Case(expert, ("experts_in", "experts_out")),
}
NOT_BY_ROWS = ("curved", "penalized", "experts")
OFFLOADS = [("offload_optimizer",), ("offload_optimizer", "offload_param")]
sweep = pytest.mark.sweep
SHAPES = {
    "into": (WIDTH, WIDE), "out": (WIDE, WIDTH), "words": (WORDS, WIDTH),
    "experts_in": (4, WIDTH, WIDE), "experts_out": (4, WIDE, WIDTH),
}  # fmt: skip


def arrays(names: tuple[str, ...], dtype: str, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=SHAPES[name]) / 5, dtype) for name in names}


def beside(dtype: str) -> dict[str, Any]:
    return {name: arrays(("into", "out"), dtype, seed) for seed, name in ((1, "base"), (2, "copy"))}


def batches(dtype: str, broken: bool = False) -> list[dict[str, np.ndarray]]:
    """``broken``: the second one has an infinite number."""
    rng = np.random.default_rng(3)
    found = []
    for i in range(STEPS):
        b = {name: rng.normal(size=(ROWS, WIDTH)).astype(dtype) for name in "xy"}
        b["ids"] = rng.integers(WORDS, size=ROWS)
        b["y"][0, 0] = np.inf if broken and i == 1 else b["y"][0, 0]
        found.append(b)
    return found


def optimizer(case: Case, dtype: str) -> optax.GradientTransformation:
    # Adam would make whole steps of fp16's rounding where a gradient is nearly zero.
    tx = optax.adamw(1e-2) if dtype == "float64" else optax.sgd(1e-1, momentum=0.9)
    if case.moves is None:
        return tx
    moves = case.moves

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "moves" if path[0].key in moves else "still", params
        )

    return optax.partition({"moves": tx, "still": optax.set_to_zero()}, labels)


class State(TrainState):
    extra: Any


class Still(nnx.Variable):
    """What is not trained."""


class Model(nnx.Module):
    def __init__(self, params: Any, extra: Any) -> None:
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))
        for name, values in extra.items():
            for key, value in values.items():
                setattr(self, f"{name}_{key}", Still(value))


def linen(case: Case, gradients: Any, wrap: Any, init: Any, dtype: str, data: Any) -> Any:
    def create() -> State:
        params = arrays(case.names, dtype)
        return State.create(
            apply_fn=None, params=params, tx=optimizer(case, dtype), extra=beside(dtype)
        )

    def step(state: State, b: Any) -> Any:
        value, grads = gradients(state.params, state.extra, b)
        return state.apply_gradients(grads=grads), value

    state, step, losses, params = init(create), wrap(step), [], []
    for b in data:
        state, value = step(state, b)
        losses.append(float(np.mean(value)))
        params.append(jax.tree.map(np.asarray, state.params))
    return losses, params


def in_nnx(case: Case, gradients: Any, wrap: Any, init: Any, dtype: str, data: Any) -> Any:
    def create() -> Any:
        model = Model(arrays(case.names, dtype), beside(dtype))
        return model, nnx.Optimizer(model, optimizer(case, dtype), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, b: Any) -> Any:
        state = nnx.state(model, nnx.Param)
        still = nnx.to_pure_dict(nnx.state(model, Still))
        extra = {
            name: {key: still[f"{name}_{key}"] for key in ("into", "out")}
            for name in ("base", "copy")
        }
        value, grads = gradients(nnx.to_pure_dict(state), extra, b)
        nnx.replace_by_pure_dict(state, grads)
        optimizer.update(model, state)
        return value

    model, optimizer_ = init(create)
    step, losses, params = wrap(step), [], []
    for b in data:
        losses.append(float(np.mean(step(model, optimizer_, b))))
        params.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    return losses, params


FLAVOURS = {"linen": (linen, jax.jit), "nnx": (in_nnx, nnx.jit)}


def run(zero: Any, name: str, flavour: str, dtype: str, data: Any) -> Any:
    """Losses and parameters of each step; of plain jit without ``zero``."""
    case, (follow, jit) = CASES[name], FLAVOURS[flavour]
    grad = jax.value_and_grad if zero is None or dtype == "float64" else zerojax.value_and_grad
    gradients = functools.partial(case.gradients, grad)
    if name == "experts":
        alone = functools.partial(expert, lambda function, whole: function, grad)
        gradients = alone if zero is None else functools.partial(expert, zero.per_device, grad)
    if zero is None:
        return follow(case, gradients, jit, lambda create: create(), dtype, data)
    return follow(case, gradients, zero, zero.init, dtype, data)


@functools.cache
def plain(name: str, flavour: str) -> Any:
    return run(None, name, flavour, "float64", batches("float64"))


def zero_of(k: int, stage: int = 3, **options: Any) -> zerojax.Zero:
    return zerojax.zero(
        stage=stage, stage3_param_persistence_threshold=0, gradient_accumulation_steps=k, **options
    )


def assert_equal(got: Any, want: Any, near: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near)


def assert_plain(zero: zerojax.Zero, name: str, flavour: str, k: int) -> None:
    """The numbers of plain jit, or where they do not add up by rows an error that says so."""
    if k > 1 and name in NOT_BY_ROWS:
        with pytest.raises(ValueError, match=f"cannot be accumulated over {k} micro-batches"):
            run(zero, name, flavour, "float64", batches("float64")[:1])
        return
    # Micro-batches round their gradients to float32, as the cast's own transpose does.
    near = 1e-6 if name == "rounded" and k > 1 else 1e-9
    assert_equal(
        run(zero, name, flavour, "float64", batches("float64")), plain(name, flavour), near
    )


BY_KIND = [
    pytest.param(flavour, k, marks=[] if (flavour, k) in (("linen", 4), ("nnx", 1)) else sweep)
    for flavour in FLAVOURS
    for k in (1, 4)
]


@pytest.mark.parametrize(("flavour", "k"), BY_KIND)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_plain_jit(name: str, flavour: str, k: int, in_float64: None) -> None:
    assert_plain(zero_of(k), name, flavour, k)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stage", "flavour", "k"),
    [(1, "linen", 4), (1, "nnx", 1), (2, "linen", 1), (2, "nnx", 4)],
)
@pytest.mark.parametrize("name", CASES)
def test_at_stages_1_and_2(name: str, stage: int, flavour: str, k: int, in_float64: None) -> None:
    assert_plain(zero_of(k, stage), name, flavour, k)


@pytest.mark.sweep
@pytest.mark.parametrize(("flavour", "k"), [("linen", 4), ("nnx", 1)])
@pytest.mark.parametrize("sections", OFFLOADS, ids=len)
@pytest.mark.parametrize("name", CASES)
def test_offload(
    name: str, sections: tuple[str, ...], flavour: str, k: int, in_float64: None
) -> None:
    assert_plain(zero_of(k, **dict.fromkeys(sections, "cpu")), name, flavour, k)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "flavour", "k"),
    [
        (name, *kind)
        for name in CASES
        for kind in (("linen", 1), ("nnx", 4), ("linen", 4))
        if kind[1] == 1 or name not in NOT_BY_ROWS
    ],
)
def test_fp16_skips(name: str, flavour: str, k: int) -> None:
    """As at stage 0; a step that overflows leaves the parameters as they were."""
    options: dict[str, Any] = {"fp16": True, "initial_scale_power": 4, "hysteresis": 1}
    data = batches("float32", broken=True)
    losses, params = run(zero_of(k, **options), name, flavour, "float32", data)
    want_losses, want = run(zero_of(k, 0, **options), name, flavour, "float32", data)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-2)
    assert_equal(params, want, 3e-3)
    jax.tree.map(np.testing.assert_array_equal, params[1], params[0])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params[2], params[1])
    assert any(jax.tree.leaves(moved))
