"""The names by which a forecast tells the arguments of a compiled step apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.foresight import attribution
from zerojax.foresight.costs import lying_between
from zerojax.hlo.program import HloProgram, parse
from zerojax.xla.lowered import GRADIENTS, STEP, LoweredProgram

pytestmark = pytest.mark.usefixtures("quick_compile")
PARAMETER = 64 * 32 * 4  # bytes of the one parameter in float32
BATCH = np.ones((8, 64), np.float32)


def create() -> TrainState:
    params = {"w": jnp.ones((64, 32))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss


def compiled(program: LoweredProgram) -> HloProgram:
    return parse(program.lowered.compile().as_text() or "")


def bytes_by_kind(program: LoweredProgram) -> dict[str, int]:
    return dict(attribution.arguments(compiled(program)))


def lowered(**keywords: Any) -> list[LoweredProgram]:
    zero = zerojax.zero(**keywords)
    return [*zero(step).programs(zero.abstract_state(create), BATCH)]


def test_of_a_resident_step() -> None:
    (only,) = lowered(stage=0)
    assert only.name == STEP
    rows = BATCH.nbytes // jax.device_count()
    kinds = bytes_by_kind(only)
    assert kinds[attribution.PARAMETERS] == PARAMETER
    assert 2 * PARAMETER <= kinds[attribution.STATE] < 2 * PARAMETER + 64
    assert kinds[attribution.BATCH] == rows
    assert kinds.get(attribution.OTHER, 0) < 64  # the counter of steps


def test_of_an_offloaded_step() -> None:
    first, load, update = lowered(stage=1, offload_optimizer="cpu", bf16=True)
    assert first.name == GRADIENTS
    n = jax.device_count()
    state, half = 3 * PARAMETER // n, PARAMETER // 2 // n
    kinds = bytes_by_kind(first)
    assert kinds[attribution.PARAMETERS] == half
    assert 0 < kinds[attribution.STATE] < 64
    assert kinds[attribution.BATCH] == BATCH.nbytes // n
    assert kinds.get(attribution.OTHER, 0) < 64
    # The text of a program for CPUs does not say that the state lies in host memory.
    kinds = bytes_by_kind(load)
    assert kinds == {attribution.GRADIENTS: state, attribution.OTHER: kinds[attribution.OTHER]}
    assert kinds[attribution.OTHER] < 64
    kinds = bytes_by_kind(update)
    assert kinds[attribution.STATE] == state  # came to the device before
    assert kinds[attribution.GRADIENTS] == half
    assert kinds[attribution.PARAMETERS] == state + half
    assert kinds[attribution.OTHER] < 64
    assert lying_between(compiled(update)) == state + 2 * half
