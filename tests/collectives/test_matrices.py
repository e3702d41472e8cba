"""Each device computes with some of the matrices of an update, and the numbers are the same."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.matrices import MatrixUpdate
from zerojax.config import OptimizerConfig
from zerojax.optim.frozen import TracedUpdate
from zerojax.optim.named import named_optimizer
from zerojax.plan import layout
from zerojax.xla import hijax

pytestmark = pytest.mark.usefixtures("quick_compile")

WIDTH, LAYERS = 8, 3
BATCH = np.random.default_rng(0).normal(size=(16, WIDTH))


def parameters(layers: int = LAYERS) -> Any:
    """Stacks of matrices of which 8 devices cannot have equal numbers, and single matrices."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 3)

    return {
        "query": normal(layers, WIDTH, WIDTH),
        "key": normal(layers, WIDTH, WIDTH),
        "up": normal(layers, WIDTH, 2 * WIDTH),
        "down": normal(layers, 2 * WIDTH, WIDTH),
        "head": normal(WIDTH, 3 * WIDTH + 1),
        "bias": normal(WIDTH),
    }


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(x @ w["query"]) @ w["key"]
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    stacks = {name: w for name, w in params.items() if w.ndim == 3}
    x, _ = jax.lax.scan(layer, x + params["bias"], stacks)
    return jnp.mean((x @ params["head"]) ** 2)


def cubic(over: Callable[..., Any]) -> optax.GradientTransformation:
    """A user's own optimizer, without state: two products of the gradient itself."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        matrices = {name: g for name, g in grads.items() if g.ndim > 1}
        directions = over(lambda g: 1.5 * g - 0.5 * (g @ g.mT) @ g)(matrices)
        return jax.tree.map(lambda d: -0.1 * d, grads | directions), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def muon() -> optax.GradientTransformation:
    return named_optimizer(OptimizerConfig(type="Muon", params={"lr": 0.05}))[0]


def numbers_of_muon(tree: Any) -> Any:
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree.map(lambda x: numbers if x.ndim > 1 else None, tree)


def by_hand(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tree: jax.tree.map(function, tree)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon": muon,
    "over_matrices": lambda: cubic(zerojax.over_matrices),
    "by_hand": lambda: cubic(by_hand),
    "optax": lambda: optax.contrib.muon(0.05, muon_weight_dimension_numbers=numbers_of_muon),
    "multi_steps": lambda: optax.MultiSteps(muon(), 2).gradient_transformation(),
}


def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state.params, x)
    return state.apply_gradients(grads=grads), loss


def exchanges(table: zerojax.step.collectives_table.CollectivesTable) -> list[Any]:
    return [row for row in table.rows if row.kind == "all-to-all"]


def create(name: str) -> TrainState:
    return TrainState.create(apply_fn=None, params=parameters(), tx=OPTIMIZERS[name]())


def assert_plain(name: str, params: Any) -> None:
    """The parameters are those after two steps of plain jit."""
    state, step = create(name), jax.jit(train_step)
    for _ in range(2):
        state, _ = step(state, BATCH)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9, err_msg=str(path))


OPTIMIZER = {"offload_optimizer": "cpu"}
CASES = [
    pytest.param("muon", {"stage": 3, "axes": {"data": 4, "model": 2}}, id="model"),
    pytest.param("muon", {"stage": 1}, id="stage 1"),
    pytest.param("over_matrices", {"stage": 3}, id="over_matrices"),
    pytest.param("muon", {"stage": 2, "k": 2}, id="accumulated", marks=pytest.mark.slow),
    pytest.param("muon", {"stage": 3, "explicit": True}, id="explicit"),
    pytest.param("multi_steps", {"stage": 3}, id="multi_steps"),
    pytest.param("muon", OPTIMIZER, id="optimizer on the host"),
    pytest.param("over_matrices", OPTIMIZER | {"offload_param": "cpu"}, id="all on the host"),
    pytest.param("multi_steps", OPTIMIZER, id="multi_steps on the host", marks=pytest.mark.slow),
    pytest.param("by_hand", OPTIMIZER, id="by hand on the host", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_numbers_of_plain_jit(name: str, setting: Any) -> None:
    """In float64; and each device computes with some of the matrices, but of a state in host
    memory."""
    with jax.enable_x64(True):
        cut = {"up": P(None, None, "model"), "down": P(None, "model")}
        specs = {name: cut.get(name) for name in parameters()}
        keywords = {"specs": specs} if "axes" in setting else {}
        setting = dict(setting)
        mesh = jax.make_mesh((8,), ("data",)) if setting.pop("explicit", False) else None
        zero = zero_for(**setting, gradient_clipping=0.0, **keywords)
        step, state = zero(train_step), create(name)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            if setting.get("k", 1) == 1 and not OPTIMIZER.keys() & setting.keys():
                rows = exchanges(step.collectives(state, BATCH))
                assert len(rows) >= 4
                assert all(len(row.shape) == 3 for row in rows)
            for _ in range(2):
                state, _ = step(state, BATCH)
        assert_plain(name, state.params)


@pytest.mark.parametrize("name", ["by_hand", "optax"])
def test_an_optimizer_that_multiplies_matrices_by_itself(name: str, caplog: Any) -> None:
    """XLA gathers its matrices, of which zerojax advises once."""
    with jax.enable_x64(True), caplog.at_level("WARNING", "zerojax"):
        step, state = zero_for(gradient_clipping=0.0)(train_step), create(name)
        for _ in range(2):
            state, _ = step(state, BATCH)
        assert_plain(name, state.params)
    (advice,) = (r.getMessage() for r in caplog.records if "over_matrices" in r.getMessage())
    assert "gathers arrays of shapes" in advice
    assert "(3, 8, 8)" in advice


@zerojax.over_matrices
def cubed(x: jax.Array) -> jax.Array:
    return x @ x.mT @ x


def chained(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """The second call begins at the first one's result; 3 and 9 matrices do not divide among 8
    devices, nor do their rows."""
    for _ in range(2):
        a, b = cubed([a, b])
        a, c = a + c, cubed(c)
    return a, b, c


def with_coefficients(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """Functions that read the same values, and others; results of which some are literals."""
    one, other = (
        zerojax.over_matrices(lambda m, n=n: n * m @ m.mT @ m) for n in (a[0, 0, :1], b[0, 0, :1])
    )
    return one([a, b]), one(b), other(b), zerojax.over_matrices(jnp.negative)(c), jnp.zeros((), int)


def in_branches(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    return jax.lax.cond(a[0, 0, 0] > 0, lambda *x: chained(*x), lambda *x: x, a, b, c)


@pytest.mark.parametrize("update", [chained, with_coefficients, in_branches])
@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"data": 8}, (None, "data", None)),
        ({"data": 4, "model": 2}, (None, "model", "data")),
        ({"data": 8}, (None, "data:(1)2", "data:(2)4")),
        ({"data": 8}, (None, None, None)),
        ({"data": 8}, None),
    ],
    ids=["rows", "two axes", "two parts", "replicated", "unknown"],
)
def test_the_same_program(update: Callable[..., Any], axes: Any, spec: Any) -> None:
    """To the last bit, in a finite field; matrices that are sharded leave their shards."""
    mesh = zerojax.mesh(8, axes=axes)
    args = [jnp.ones(shape) for shape in ((3, 3, 5), (9, 2, 4), (3, 3, 5))]
    gatherer: Any = SimpleNamespace(
        mesh=mesh,
        ledger=Ledger(mesh),
        constrain_always=lambda x, spec: jax.lax.with_sharding_constraint(
            x, layout.sharding(mesh, spec)
        ),
    )
    specs = [spec, spec and (None, *spec[:0:-1]), spec]  # of columns where others are of rows
    run = MatrixUpdate(gatherer, [x.shape for x in args], specs)

    def distributed(*args: jax.Array) -> Any:
        return TracedUpdate(update, *args)(*args, run=run)

    assert exact.differing(distributed, update, *args) == []
    is_sent = "sharding_constraint" in str(hijax.trace(distributed, *args)[0])
    assert is_sent == bool(spec and any(spec))
