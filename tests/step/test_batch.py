"""Batches whose rows are not their first dimension: a step that scans over updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equal import TOLERANCE, assert_near, zero_for
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec
from train_state.test_pytree import (
    WIDTH,
    arrays,
    loss_of,
    params_and_opt_state,
    train_state,
    updated,
)

import zerojax
from zerojax.devices.mesh import batch_devices
from zerojax.step.batch import BatchLayout

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS, ROWS = 4, 16
NUMBERS = np.random.default_rng(1).normal(size=(2, STEPS, ROWS, WIDTH))
BATCH = dict(zip("xy", NUMBERS, strict=True))


def several(params: Any, opt_state: Any, batch: Any) -> Any:
    def body(state: Any, part: Any) -> Any:
        *state, loss = updated(*state, part)
        return tuple(state), loss

    state, losses = lax.scan(body, (params, opt_state), batch)
    return *state, losses


def several_in_train_state(state: TrainState, batch: Any) -> Any:
    def body(state: TrainState, part: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state.params, part)
        return state.apply_gradients(grads=grads), loss

    return lax.scan(body, state, batch)


@pytest.mark.parametrize("form", ["arguments", "TrainState"])
def test_the_numbers_of_plain_jit(form: str) -> None:
    step = several if form == "arguments" else several_in_train_state
    with jax.enable_x64(True):
        batch = jax.tree.map(jnp.asarray, BATCH)
        results = []
        for run in (zero_for(3, small_array_size=0)(step, batch_axis=1), jax.jit(step)):
            state = params_and_opt_state() if form == "arguments" else (train_state(0),)
            *state, losses = run(*state, batch)
            results.append(arrays((getattr(state[0], "params", state), losses)))
    assert_near(*results, TOLERANCE["float64"])


def test_rows_are_sharded() -> None:
    zero = zero_for(3)
    layout = BatchLayout(zero.mesh, zero.config.batch(batch_devices(zero.mesh)), axis=1)
    placed = layout.place({**BATCH, "rate": 0.1})
    assert placed["x"].sharding.spec == PartitionSpec(None, ("data",))
    assert layout.rows(BATCH) == ROWS
    abstract = layout.abstract(BATCH)
    assert abstract["x"].sharding == placed["x"].sharding


@pytest.mark.parametrize(
    ("batch", "config", "says"),
    [
        ({"x": np.ones((8, 12, WIDTH))}, {}, r"batch's dimension 1 12 is not divisible by 8"),
        (
            {**BATCH, "rate": np.ones(STEPS)}, {},
            r"\['rate'\] \(4,\) has no dimension 1.*batch_axis=1.*further argument",
        ),
        (BATCH, {"train_batch_size": 32}, "has 16 rows, but train_batch_size is 32"),
        (
            BATCH, {"gradient_accumulation_steps": 2},
            "batch_axis=1 with gradient_accumulation_steps = 2.*Remove one.*moveaxis",
        ),
        (
            BATCH, {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
            "batch_axis=1 with the mesh axis \"stage\": micro-batches are cut",
        ),
    ],
)  # fmt: skip
def test_errors(batch: Any, config: Any, says: str) -> None:
    zero = zerojax.zero({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0, **config})
    with pytest.raises(ValueError, match=says):
        zero(several_in_train_state, batch_axis=1).lower(train_state(0), batch)


@pytest.mark.parametrize(
    ("batch", "steps", "says"),
    [
        (
            np.ones((20, WIDTH)), 8,
            r"dimension 20 is not divisible by 16 \(8 devices in 4 pipeline stages, 8 micro-batches"
            r"\)\. Use 16 or 32 rows",
        ),
        (np.ones((4, WIDTH)), 2, r"4 is not divisible by 8 \(8 devices in 4 .*. Use 8 rows"),
        ({"x": np.ones((16, 2)), "y": np.ones((8, 2))}, 1, 'differ .* without the axis "stage"'),
        (np.ones((16, WIDTH)), 4, None),
    ],
)  # fmt: skip
def test_rows_in_pipeline_stages(batch: Any, steps: int, says: str | None) -> None:
    zero = zerojax.zero(stage=1, pipeline_stages=4, gradient_accumulation_steps=steps)
    layout = BatchLayout(zero.mesh, zero.config.batch(2))
    if says is None:  # one batch, whose rows all devices share
        assert layout.abstract(batch).sharding.spec == PartitionSpec(("stage", "data"))
        return
    with pytest.raises(ValueError, match=says):
        layout.check(batch)


@pytest.mark.parametrize("config", [{}, {"train_batch_size": ROWS}])
def test_errors_say_which_dimension_would_do(config: Any) -> None:
    with pytest.raises(ValueError, match=r"If dimension 1 \(16\) has the rows.*batch_axis=1"):
        zerojax.zero(stage=3, **config)(several).lower(*params_and_opt_state(), BATCH)


@pytest.mark.parametrize("axis", [-1, 1.0, True])
def test_a_dimension_that_is_none(axis: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_axis: expected a dimension.*got {axis}"):
        zerojax.zero(stage=3)(several, batch_axis=axis)
