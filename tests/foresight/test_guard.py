"""A step that does not fit is not run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.foresight.devices import free_bytes
from zerojax.foresight.guard import Guard, OutOfMemoryError
from zerojax.step.arguments import Arguments
from zerojax.step.train_step import Step

pytestmark = pytest.mark.usefixtures("quick_compile")
DIM, LAYERS, ROWS = 64, 3, 256


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = nn.relu(nn.Dense(DIM, use_bias=False)(x))
        return x


def create_state(key: jax.Array) -> TrainState:
    model = Model()
    params = model.init(key, jnp.zeros((1, DIM)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(state.apply_fn({"params": params}, batch["x"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def linear() -> Any:
    model = nnx.Linear(DIM, 4 * DIM, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def nnx_step(model: Any, optimizer: Any, batch: Any) -> Any:
    grads = nnx.grad(lambda model: jnp.mean(model(batch["x"]) ** 2))(model)
    optimizer.update(model, grads)


BATCH = {"x": np.ones((ROWS, DIM))}  # float64: jax makes it float32


def guard_of(
    zero: zerojax.Zero,
    free: Callable[[Any], int | None],
    create: Callable[..., Any] = create_state,
    function: Callable[..., Any] = train_step,
) -> Guard:
    """A check on devices with so many bytes free."""

    def other(config: Any, *_: Any) -> Any:
        under = zerojax.zero(config, mesh=zero.mesh)
        made = (
            under.abstract_state(create, jax.random.key(0))
            if create is create_state
            else (under.abstract_state(create))
        )
        objects = made if isinstance(made, tuple) else (made,)
        return under.plan(*objects), lambda: under(function).programs(*objects, BATCH)

    return Guard(zero.config, zero.mesh, other, free)


def guarded(zero: zerojax.Zero, free: int | None, *made: Callable[..., Any]) -> Step[..., Any]:
    """A step on devices with so many bytes free."""
    function = made[1] if made else train_step
    guard = guard_of(zero, lambda mesh: free, *made)
    return Step(Arguments(function), zero.states, True, guard)


def test_a_step_that_fits_runs_and_is_compiled_once(compiles: list[str]) -> None:
    zero = zerojax.zero(stage=1)
    state = zero.init(create_state, jax.random.key(0))
    step = guarded(zero, 10**9)
    compiles.clear()
    state, _ = step(state, BATCH)
    assert len(compiles) == 1
    state, _ = step(state, BATCH)
    assert len(compiles) == 1


def test_nnx_is_checked_once() -> None:
    asked: list[int] = []

    def free(mesh: Any) -> int:
        asked.append(1)
        return 10**9

    zero = zerojax.zero(stage=1)
    model, optimizer = zero.init(linear)
    step = Step(Arguments(nnx_step), zero.states, True, guard_of(zero, free, linear, nnx_step))
    for _ in range(3):
        step(model, optimizer, BATCH)
    assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("offload", ["offload_optimizer", "offload_param"])
def test_every_program_of_an_offloaded_step_counts(offload: str) -> None:
    zero = zerojax.zero(stage=3, **{offload: "cpu"})
    state = zero.init(create_state, jax.random.key(0))
    state, _ = guarded(zero, 10**9)(state, BATCH)
    with pytest.raises(OutOfMemoryError, match="on each device"):
        guarded(zero, 1000)(state, BATCH)


@pytest.mark.slow
def test_one_that_does_not_is_told_what_would(capfd: pytest.CaptureFixture[str]) -> None:
    zero = zerojax.zero(stage=0)
    state = zero.init(create_state, jax.random.key(0))
    with pytest.raises(OutOfMemoryError, match="on each device") as error:
        guarded(zero, 1000)(state, BATCH)
    told = str(error.value)
    assert '"zero_optimization": {"stage": 1}' in told
    assert "optimizer state" in told
    assert "does not fit; compiling stage 1" in capfd.readouterr().err
    # Nothing was run or taken.
    assert int(state.step) == 0
    guarded(zero, None)(state, BATCH)


def test_the_check_has_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def tight(*setting: Any) -> Guard:
        return Guard(*setting[:2], lambda *_: {}["no search"], lambda mesh: 1000)

    monkeypatch.setattr("zerojax.api.Guard", tight)
    state = zerojax.zero(stage=3).init(create_state, jax.random.key(0))
    with pytest.raises(OutOfMemoryError):
        zerojax.zero(stage=3)(train_step)(state, BATCH)
    state, _ = zerojax.zero(stage=3, check_memory=False)(train_step)(state, BATCH)
    assert int(state.step) == 1


def test_where_nothing_helps_it_says_so() -> None:
    zero = zerojax.zero(stage=3)
    state = zero.init(create_state, jax.random.key(0))
    with pytest.raises(MemoryError, match=r"nn.remat on the model's blocks"):
        guarded(zero, -(10**9))(state, BATCH)


def refuse_together(process: int) -> None:
    """Their devices have 1000 and 2000 bytes."""
    device: Any = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000 * (1 + process)})
    theirs: Any = SimpleNamespace(local_devices=[device])
    assert free_bytes(theirs) == 1000
    zero = zerojax.zero(stage=2)
    state = zero.init(create_state, jax.random.key(0))
    guard = guard_of(zero, lambda mesh: free_bytes(theirs))
    by_row = NamedSharding(zero.mesh, PartitionSpec("data"))
    half = BATCH["x"][: ROWS // 2].astype(np.float32)
    batch = {"x": jax.make_array_from_process_local_data(by_row, half)}
    with pytest.raises(OutOfMemoryError, match="`zerojax plan`"):
        Step(Arguments(train_step), zero.states, True, guard)(state, batch)


def test_processes_refuse_together(
    in_two_processes: Callable[..., list[Any]], quick_processes: None
) -> None:
    """By the least that is free in any of them: one alone would wait for the other's steps."""
    assert in_two_processes(refuse_together) == [None, None]
