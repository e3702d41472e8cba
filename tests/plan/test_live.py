"""Which parameters stay gathered over an update at stage 3, and what the plan says of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

SHAPES = {"small": (128,), "square": (128, 128), "stack": (4, 128, 256), "table": (1024, 128)}
TOTAL = sum(map(math.prod, SHAPES.values()))
SQUARE, STACK, TABLE = (math.prod(SHAPES[name]) for name in ("square", "stack", "table"))


def create() -> TrainState:
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def plan_of(**keywords: Any) -> Any:
    given = {"stage": 3, "stage3_param_persistence_threshold": 0, **keywords}
    zero = zerojax.zero(mesh=keywords.pop("mesh", None), **given)
    return zero.plan(jax.eval_shape(create))


def staying(live: int, distance: int | None = None, **keywords: Any) -> set[str]:
    given = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": distance}
    return {leaf.path.split("'")[1] for leaf in plan_of(**given, **keywords).live.leaves}


@pytest.mark.parametrize(
    ("live", "names"),
    [
        (0, set()),
        (SQUARE - 1, set()),
        (SQUARE, {"square"}),
        (STACK - 1, {"square"}),
        (STACK, {"stack"}),  # the largest first, each whole or not at all; a stack is one
        (STACK + SQUARE, {"stack", "square"}),
        (10**12, {"table", "stack", "square"}),  # small ones are gathered once anyway
    ],
)
def test_the_largest_stay_as_far_as_there_is_room(live: int, names: set[str]) -> None:
    assert staying(live) == names


def test_what_is_used_again_too_late_does_not_stay() -> None:
    """Between two uses may lie all others, in a forward and a backward pass."""
    assert staying(10**12, 2 * TOTAL) == {"table", "stack", "square"}
    assert staying(10**12, 2 * (TOTAL - STACK)) == {"table", "stack"}
    assert staying(10**12, 2 * (TOTAL - STACK) - 1) == set()
    assert staying(10**12, 0) == set()


def test_as_deepspeed_configs_print_both_keys_small_models_stay() -> None:
    def zero(**keys: Any) -> zerojax.Zero:
        return zerojax.zero({"zero_optimization": {"stage": 3, **keys}})

    keys = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    state = jax.eval_shape(create)
    assert [leaf.path for leaf in zero(**keys).plan(state).live.leaves] == [
        "params['stack']", "params['table']",
    ]  # fmt: skip
    for less in ({}, {key: 0 for key in keys}, {key: "auto" for key in keys}):
        assert not zero(**less).plan(state).live

    def large() -> TrainState:
        params = {name: np.broadcast_to(np.float32(0), (30_000, 10_000)) for name in "ab"}
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    plan = zero(**keys).plan(zero().abstract_state(large))
    assert plan.live  # 600,000,000 elements: up to 600,000,000 come between two uses
    keys["stage3_max_reuse_distance"] = 5e8
    plan = zero(**keys).plan(zero().abstract_state(large))
    assert not plan.live
    assert "up to 600,000,000 elements of others come between two uses" in str(plan)


@pytest.mark.parametrize(
    "keywords",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "offload_param": "cpu"}],
)
def test_nothing_stays_where_nothing_is_dropped(keywords: dict[str, Any]) -> None:
    plan = plan_of(stage3_max_live_parameters=10**12, **keywords)
    assert not plan.live
    (note,) = [note for note in plan.config.notes if "max_live" in note.key]
    assert note.status == "no effect"
    assert note.reason in str(plan)


def test_the_plan_shows_what_is_held_and_saved() -> None:
    plan = plan_of(stage3_max_live_parameters=STACK, bf16=True, gradient_accumulation_steps=4)
    (leaf,) = plan.live.leaves
    assert (leaf.bytes, leaf.bytes_per_device) == (2 * STACK, 2 * STACK)
    assert (
        "stage3_max_live_parameters = 131,072: 1 parameters of 131,072 elements stay gathered over "
        "an update, 262 kB on each device; up to 1.61 MB less are gathered"
    ) in str(plan)  # 7 gathers less of 7/8 of it
    assert "stay gathered" in [line[:13] for line in str(plan).splitlines()]
    assert "stay gathered" not in str(plan_of())


def test_users_axes_stay_cut() -> None:
    mesh = zerojax.mesh(axes={"data": 4, "model": 2})
    zero = zerojax.zero(
        stage=3, mesh=mesh, stage3_param_persistence_threshold=0,
        stage3_max_live_parameters=10**12,
        specs={name: jax.sharding.PartitionSpec("model") for name in SHAPES},
    )  # fmt: skip
    table = next(
        leaf for leaf in zero.plan(jax.eval_shape(create)).live.leaves if "table" in leaf.path
    )
    assert table.bytes_per_device == table.bytes // 2
