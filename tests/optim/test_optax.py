"""Optimizers of optax compute plain jit's numbers: one of each form of state and of update."""

import functools
from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from equal import STEPS, TOLERANCE, assert_near, host, zero_for
from flax.training.train_state import TrainState

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

ROWS, WIDTH, HIDDEN = 32, 8, 24
BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)), strict=True))
RATE = 0.01


def network() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / 3,
        "bias": jnp.full((HIDDEN,), 0.1),
        "out": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / 5,
        "temperature": jnp.ones(()),
    }


def loss_of(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((params["temperature"] * (hidden @ params["out"]) - batch["y"]) ** 2)


def mask(tree: Any) -> Any:
    """Of the two matrices; a tree of the same form, also of shapes."""
    return jax.tree.map(lambda x: len(x.shape) == 2, tree)


def adam() -> Any:
    return optax.adam(RATE)


SINGLE = jax.tree.map(lambda x: x.astype(np.float32), BATCH)
ZOOM = "optax.scale_by_zoom_linesearch"
LOOKAHEAD = "optax.lookahead"
"""Its parameters are ``optax.LookaheadParams``."""
DPSGD = "optax.contrib.dpsgd"
"""Its gradients have a leading dimension of rows."""
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "optax.MultiSteps": lambda: optax.MultiSteps(adam(), 2).gradient_transformation(),
    "optax.adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "optax.apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "optax.flatten": lambda: optax.flatten(adam()),
    "optax.inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(RATE, 0.0, 5)
    ),
    "optax.lbfgs": lambda: optax.lbfgs(
        linesearch=optax.scale_by_backtracking_linesearch(15, store_grad=True)
    ),
    LOOKAHEAD: lambda: optax.lookahead(adam(), 2, 0.5),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(1)),
    "optax.partition": lambda: optax.partition(
        {True: adam(), False: optax.sgd(RATE, momentum=0.9)}, mask
    ),
    "optax.polyak_sgd": optax.polyak_sgd,
    ZOOM: lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
    "optax.sm3": lambda: optax.masked(
        optax.sm3(RATE), lambda tree: jax.tree.map(lambda x: bool(x.shape), tree)
    ),
    "optax.contrib.dog": lambda: optax.contrib.dog(learning_rate=RATE),
    DPSGD: lambda: optax.contrib.dpsgd(RATE, 1.0, 0.1, seed=1),
    "optax.contrib.galore": lambda: optax.contrib.galore(RATE, rank=4, update_proj_gap=2),
    "optax.contrib.reduce_on_plateau": lambda: optax.chain(
        adam(), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)
    ),
    "optax.contrib.sam": lambda: optax.contrib.sam(
        adam(), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    ),
    "optax.contrib.sam, opaque": lambda: optax.contrib.sam(
        adam(), optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
    ),
    "optax.contrib.schedule_free": lambda: optax.contrib.schedule_free(adam(), RATE),
}

LINE_SEARCH = ("value", "grad", "value_fn")
NEEDS: dict[str, tuple[str, ...]] = {
    "optax.lbfgs": LINE_SEARCH,
    "optax.polyak_sgd": ("value",),
    ZOOM: LINE_SEARCH,
    "optax.contrib.reduce_on_plateau": ("value",),
    "optax.contrib.sam, opaque": ("grad_fn",),
}
"""Arguments of an update beside gradient, state and parameters."""


def parameters(name: str) -> Any:
    return optax.LookaheadParams.init_synced(network()) if name == LOOKAHEAD else network()


def gradients(name: str, params: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The loss, its gradients, and what else the update needs."""
    trained = params.fast if name == LOOKAHEAD else params

    def loss(params: Any, *_: Any) -> jax.Array:
        return loss_of(params, batch)

    value, grads = jax.value_and_grad(loss)(trained)
    known = {"value": value, "grad": grads, "value_fn": loss, "grad_fn": jax.grad(loss)}
    if name == DPSGD:
        grads = jax.vmap(jax.grad(loss_of), (None, 0))(trained, batch)
    return value, grads, {key: known[key] for key in NEEDS.get(name, ())}


def as_arguments(name: str, tx: Any, params: Any, opt_state: Any, batch: Any) -> Any:
    value, grads, extra = gradients(name, params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state, value


def on_train_state(name: str, state: TrainState, batch: Any) -> Any:
    value, grads, extra = gradients(name, state.params, batch)
    if not extra:
        return state.apply_gradients(grads=grads), value
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params, **extra)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value


def steps_of_arguments(name: str, run: Callable[..., Any]) -> Any:
    tx, params = OPTIMIZERS[name](), parameters(name)
    step = run(functools.partial(as_arguments, name, tx))
    state, values = (params, tx.init(params)), []
    for _ in range(STEPS):
        *state, value = step(*state, BATCH)
        values.append(value)
    return host((values, state[0]))


def evaluates_the_loss(name: str) -> bool:
    return name == "optax.contrib.sam, opaque" or NEEDS.get(name) == LINE_SEARCH


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exactly(name: str) -> None:
    """At stage 3: the state as a ``TrainState`` by micro-batch, or as two arguments."""
    tx, params = OPTIMIZERS[name](), parameters(name)
    create = functools.partial(TrainState.create, apply_fn=None, params=params, tx=tx)
    source = emitted.Source(create, functools.partial(on_train_state, name), (SINGLE,))
    if evaluates_the_loss(name):
        with pytest.raises(ValueError, match="cannot be accumulated over 4 micro-batches"):
            emitted.check(source, 3, 4)
    emitted.check(source, 3, 1 if evaluates_the_loss(name) else 4, small_array_size=0)
    if name != ZOOM:
        step = functools.partial(as_arguments, name, tx)
        create_pair = lambda: (params, tx.init(params))  # noqa: E731
        source = emitted.Source(create_pair, step, (SINGLE,), emitted.in_arguments)
        emitted.check(source, 3, small_array_size=0)


@pytest.mark.parametrize("name", ["optax.contrib.dog", pytest.param(ZOOM, marks=pytest.mark.slow)])
def test_compiled(name: str, in_float64: None) -> None:
    """Three steps; hashes in place of numbers do not end the line search."""
    pair = (steps_of_arguments(name, run) for run in (zero_for(3), jax.jit))
    assert_near(*pair, TOLERANCE["float64"])


def test_what_the_first_update_adds_to_its_state() -> None:
    """``optax.monitor`` has no measurements before. Such a state is neither a batch, nor one that a
    ``TrainState`` can keep."""
    tx, params = optax.chain(optax.monitor({"size": optax.tree.norm}), adam()), network()
    step = functools.partial(as_arguments, "optax.adam", tx)
    given = params, tx.init(params), BATCH
    got, want = zero_for(3, 4)(step)(*given), jax.jit(step)(*given)
    assert_near(host(got), host(want), TOLERANCE["float32"])
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(TypeError, match=r"measurements\['size'\] added.*Create the state with"):
        zero_for(3)(functools.partial(on_train_state, "optax.adam"))(state, BATCH)


def test_a_number_that_becomes_an_array_is_named() -> None:
    """Its shape would be another after each step; plain jit compiles anew."""
    tx = optax.chain(optax.scale_by_distance_over_gradients(), optax.scale(-RATE))
    state = TrainState.create(apply_fn=None, params=network(), tx=tx)
    step = functools.partial(on_train_state, "optax.sgd")
    with pytest.raises(TypeError, match=r"\['params'\]\['temperature'\] from \(\) to"):
        zero_for(3)(step)(state, BATCH)
