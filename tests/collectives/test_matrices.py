"""Functions of matrices in an update: the numbers of plain jit, and the program for one matrix."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import zerojax
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.matrices import MatrixUpdate
from zerojax.collectives.matrices.entry import Entries, NotByEntry, Stack
from zerojax.optim.frozen import TracedUpdate

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


class ShampooState(NamedTuple):
    left: Any
    right: Any


def shampoo(rate: float) -> optax.GradientTransformation:
    """A user's own optimizer, of three arrays for each matrix: -r (G G^T)^-1/4 G (G^T G)^-1/4."""

    def root(s: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(s)
        return (vectors * values**-0.25) @ vectors.T

    def of_matrix(g: Any, left: Any, right: Any) -> Any:
        left, right = left + g @ g.T, right + g.T @ g
        return -rate * root(left) @ g @ root(right), left, right

    def of_leaf(g: Any, left: Any, right: Any) -> Any:
        if g.ndim == 1:
            return -rate * g, left, right
        return (jax.vmap(of_matrix) if g.ndim == 3 else of_matrix)(g, left, right)

    def init(params: Any) -> ShampooState:
        def start(at: int) -> Any:
            def eye(p: Any) -> Any:
                n = p.shape[at]
                return jnp.broadcast_to(jnp.eye(n), (*p.shape[:-2], n, n)).astype(p.dtype)

            return jax.tree.map(lambda p: eye(p) if p.ndim > 1 else jnp.zeros(()), params)

        return ShampooState(start(-2), start(-1))

    def update(grads: Any, state: ShampooState, params: Any = None) -> Any:
        new = jax.tree.map(of_leaf, grads, state.left, state.right)
        u, left, right = (jax.tree.map(lambda _, x, i=i: x[i], grads, new) for i in range(3))
        return u, ShampooState(left, right)

    return optax.GradientTransformation(init, update)


def muon(**options: Any) -> optax.GradientTransformation:
    def numbers(tree: Any) -> Any:
        return jax.tree.map(lambda x: MuonDimensionNumbers(-2, -1) if x.ndim > 1 else None, tree)

    return optax.contrib.muon(0.05, muon_weight_dimension_numbers=numbers, **options)


def by_hand(rate: float) -> optax.GradientTransformation:
    """Without state: two products of the gradient itself."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        def direction(g: Any) -> Any:
            return -rate * (g if g.ndim == 1 else 1.5 * g - 0.5 * (g @ g.mT) @ g)

        return jax.tree.map(direction, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon": muon,
    "muon_adaptive_aol": lambda: muon(adaptive=True, preconditioning="aol", weight_decay=0.1),
    "by_hand": lambda: by_hand(0.1),
    "muon_dion": lambda: muon(ns_coeffs="dion"),
    "shampoo": lambda: shampoo(0.1),
    "multi_steps": lambda: optax.MultiSteps(muon(), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(muon(), 3),
}


def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state.params, x)
    return state.apply_gradients(grads=grads), loss


def pair_step(tx: Any) -> Callable[..., Any]:
    """A step of parameters and optimizer state."""

    def run(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return run


def exchanges(table: zerojax.step.collectives_table.CollectivesTable) -> list[Any]:
    return [row for row in table.rows if row.kind == "all-to-all"]


CASES = [
    pytest.param("muon", {"stage": 3}, id="muon"),
    pytest.param("muon", {"stage": 1}, id="muon-1"),
    pytest.param("muon", {"stage": 2, "k": 2}, id="muon-2-accumulated", marks=pytest.mark.slow),
    pytest.param("muon", {"stage": 3, "axes": {"data": 4, "model": 2}}, id="muon-model"),
    pytest.param("muon_adaptive_aol", {"stage": 3}, id="aol", marks=pytest.mark.slow),
    pytest.param("muon_dion", {"stage": 3}, id="coefficients"),
    pytest.param("by_hand", {"stage": 3}, id="by_hand"),
    pytest.param("shampoo", {"stage": 3}, id="shampoo", marks=pytest.mark.slow),
    pytest.param("muon", {"stage": 3, "explicit": True}, id="explicit"),
    pytest.param("multi_steps", {"stage": 3}, id="multi_steps"),
    pytest.param("apply_if_finite", {"stage": 2}, id="apply_if_finite"),
]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_numbers_of_plain_jit(name: str, setting: Any) -> None:
    """In float64; and each device computes with some of the matrices."""
    with jax.enable_x64(True):

        def create() -> TrainState:
            tx = OPTIMIZERS[name]()
            return TrainState.create(apply_fn=None, params=parameters(), tx=tx)

        cut = {"up": P(None, None, "model"), "down": P(None, "model")}
        specs = {name: cut.get(name) for name in parameters()}
        keywords = {"specs": specs} if "axes" in setting else {}
        mesh = jax.make_mesh((8,), ("data",)) if setting.pop("explicit", False) else None
        zero = zero_for(**setting, gradient_clipping=0.0, **keywords)
        step, plain, state, alone = zero(train_step), jax.jit(train_step), create(), create()
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            if setting.get("k", 1) == 1:
                rows = exchanges(step.collectives(state, BATCH))
                assert len(rows) >= 4
                assert all(len(row.shape) == 3 for row in rows)  # matrices, not stacks of them
            for _ in range(2):
                state, _ = step(state, BATCH)
        for _ in range(2):
            alone, _ = plain(alone, BATCH)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(alone.params),
            jax.tree.leaves(state.params),
            strict=True,
        ):
            np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9, err_msg=str(path))


@pytest.mark.parametrize(
    ("name", "wrapped", "setting"),
    [
        ("muon", True, {"stage": 3}),
        ("muon", False, {"stage": 2}),
        ("multi_steps", True, {"stage": 3}),
        ("shampoo", True, {"stage": 3, "k": 2}),
        ("muon", False, {"stage": 3, "explicit": True}),
    ],
)
def test_a_step_of_parameters_and_optimizer_state(name: str, wrapped: bool, setting: Any) -> None:
    explicit = jax.make_mesh((8,), ("data",)) if setting.pop("explicit", False) else None
    with jax.enable_x64(True):
        zero, tx = zero_for(**setting), OPTIMIZERS[name]()
        own = zero.wrap(tx) if wrapped else tx
        step, plain = zero(pair_step(own)), jax.jit(pair_step(tx))
        state, alone = ((parameters(), t.init(parameters())) for t in (own, tx))
        with contextlib.nullcontext() if explicit is None else jax.set_mesh(explicit):
            if setting.get("k", 1) == 1:
                assert len(exchanges(step.collectives(state, BATCH))) >= 4
            for _ in range(2):
                state, _ = step(state, BATCH)
        for _ in range(2):
            alone, _ = plain(alone, BATCH)
        for x, y in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(state[0]), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("muon", {"offload_optimizer": "cpu"}),
        ("by_hand", {"offload_optimizer": "cpu", "offload_param": "cpu"}),
        pytest.param("shampoo", {"offload_optimizer": "cpu"}, marks=pytest.mark.slow),
        pytest.param("multi_steps", {"offload_optimizer": "cpu"}, marks=pytest.mark.slow),
    ],
)
def test_a_state_in_host_memory(name: str, offload: Any) -> None:
    """In float64; each device updates some of the matrices, equal ones in one program."""
    with jax.enable_x64(True):

        def create() -> TrainState:
            return TrainState.create(apply_fn=None, params=parameters(), tx=OPTIMIZERS[name]())

        zero = zero_for(gradient_clipping=0.0, **offload)
        step, plain, state, alone = zero(train_step), jax.jit(train_step), create(), create()
        _, *updates = (each.lowered.as_text() for each in step.programs(state, BATCH))
        with_matrices = [text for text in updates if "dot_general" in text]
        assert with_matrices
        assert all("all_to_all" in text for text in with_matrices)
        for _ in range(2):
            state, _ = step(state, BATCH)
            alone, _ = plain(alone, BATCH)
        for x, y in zip(jax.tree.leaves(alone.params), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-9)


def entry_of(function: Callable[..., Any], *stacks: np.ndarray) -> np.ndarray:
    """The last entry of a function's result, computed by the program for one entry."""
    closed = jax.make_jaxpr(function)(*stacks)
    given = [Stack(x[-1:], at=0) for x in stacks]
    (out,) = Entries(len(stacks[0])).run(closed, given)
    assert out.at is not None
    return np.asarray(out.value)


STACK = np.random.default_rng(2).normal(size=(5, 4, 6)).astype(np.float32)
BY_ENTRY: dict[str, Callable[[Any], Any]] = {
    "products": lambda x: x @ x.mT @ x,
    "norm": lambda x: x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-3),
    "constants": lambda x: x + jnp.full(x.shape, 2.0) * jnp.eye(4, 6),
    "merged": lambda x: (
        jnp.tanh(x.reshape(20, 6)).reshape(5, 24)[:, :, None] * jnp.ones((5, 24, 1))
    ),
    "factorized": lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(4)),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y @ x.mT @ x * 0.1, x),
    "choice": lambda x: jax.lax.cond(x.shape[0] > 3, jnp.sin, jnp.cos, x),
    "carried": lambda x: jax.lax.fori_loop(
        0, 2, lambda i, c: (c[0] @ x.mT @ x + c[1], 2 * c[1]), (x, jnp.full((4, 6), 0.1))
    )[0],
    "scanned": lambda x: jax.lax.scan(
        lambda y, c: (y @ x.mT @ x + c, None), x, jnp.broadcast_to(jnp.eye(4, 6), (2, 4, 6))
    )[0],
    "joined": lambda x: jnp.concatenate([x, jnp.zeros((5, 1, 6))], axis=1),
}


@pytest.mark.parametrize("name", BY_ENTRY)
def test_the_program_for_one_entry(name: str) -> None:
    function = BY_ENTRY[name]
    np.testing.assert_allclose(
        entry_of(function, STACK), function(STACK)[-1:], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(axis=0),
        lambda x: x[::-1],
        lambda x: x.reshape(4, 5, 6),
        lambda x: x * jnp.arange(5.0)[:, None, None],
        lambda x: jnp.cumsum(x, axis=1),
        lambda x: jax.lax.cond(x.shape[0] > 3, jnp.zeros_like, jnp.sin, x),
    ],
    ids=["mean", "reversed", "mixed", "numbered", "no_rule", "choice"],
)
def test_entries_that_meet_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(NotByEntry):
        entry_of(function, STACK)


def cubed(x: jax.Array) -> jax.Array:
    return x @ x.mT @ x


def unused(a: jax.Array, b: jax.Array) -> Any:
    cubed(a)
    return cubed(b)


def chained(a: jax.Array, b: jax.Array) -> Any:
    """Two equal functions, each of two results; the second one begins at the first one's result."""
    for _ in range(2):
        a = cubed(a)
        b = cubed(b) + a @ b
        a = jnp.sin(a)
    return a, b


def constrained(a: jax.Array, b: jax.Array) -> Any:
    mesh = zerojax.mesh(8)
    return cubed(jax.lax.with_sharding_constraint(a @ b, NamedSharding(mesh, P())))


def printed(a: jax.Array, b: jax.Array) -> Any:
    jax.debug.print("norm {}", jnp.linalg.norm(a) > 0)
    return cubed(a)


def numbered(a: jax.Array, b: jax.Array) -> Any:
    """The second result is a literal of the jaxpr."""
    return cubed(a), jnp.zeros((), jnp.int8)


@pytest.mark.parametrize("update", [unused, chained, constrained, printed, numbered])
def test_updates_of_other_forms(update: Callable[..., Any], capfd: Any, caplog: Any) -> None:
    mesh = zerojax.mesh(8)
    gatherer: Any = SimpleNamespace(mesh=mesh, ledger=Ledger(mesh))
    args = [jnp.asarray(BATCH[:8] / 3), jnp.asarray(BATCH[8:] / 3)]
    matrices = MatrixUpdate(gatherer, [x.shape for x in args], [("data", None)] * 2)

    def distributed(*args: jax.Array) -> Any:
        return TracedUpdate(update, *args)(*args, run=matrices)

    with caplog.at_level("WARNING", "zerojax"):
        got, want = jax.jit(distributed)(*args), jax.jit(update)(*args)
    assert ("XLA gathers arrays of shapes (8, 8)" in caplog.text) == (update is constrained)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("norm True") == 2 * (update is printed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_parameters_with_functions() -> None:
    """As in Equinox, whose modules have functions among their leaves."""
    tx, matrices = zerojax.wrap(optax.sgd(0.5)), MatrixUpdate(None, [], [])  # type: ignore[arg-type]

    @jax.jit
    def updates(w: jax.Array) -> Any:
        state = tx.init({"w": w, "activation": None})
        params = {"w": w, "activation": jnp.tanh}
        return tx.update({"w": w, "activation": None}, state, params, run=matrices)[0]  # type: ignore[call-arg]

    assert updates(jnp.ones(2))["w"].tolist() == [-0.5, -0.5]
