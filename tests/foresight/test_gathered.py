"""How many parameters stay gathered, with forecasts that are made up."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.foresight.choice import Choice
from zerojax.foresight.gathered import with_room_filled

SHAPES = {"table": (1024, 128), "stack": (4, 128, 256), "square": (128, 128)}
TABLE, STACK, SQUARE = map(math.prod, SHAPES.values())  # elements, of 2 bytes each
CHOICE = Choice(stage=3, micro=1)
WHOLE = TABLE + STACK + SQUARE


def create() -> TrainState:
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


class MadeUp:
    """Devices with so many bytes free, where what stays gathered takes ``factor`` times its size.

    Args:
      limit: The elements above which XLA computes values again.

    Attributes:
      asked: Elements that were to stay gathered, forecast by forecast.
    """

    def __init__(self, room: int, factor: float = 1.0, limit: int = WHOLE) -> None:
        self.room, self.factor, self.limit = room, factor, limit
        self.asked: list[int] = []

    def plan(self, choice: Choice) -> Any:
        config = zerojax.ZeroConfig(stage=3, bf16=True, stage3_param_persistence_threshold=0)
        return zerojax.zero(choice.config(config, 8)).plan(jax.eval_shape(create))

    def tried(self, choice: Choice) -> Any:
        spare = self.room - int(self.factor * self.plan(choice).live.bytes)
        self.asked += [choice.live] if choice.live else []
        return SimpleNamespace(
            spare=spare, fits=spare >= 0, seconds=1.0, recomputes=choice.live > self.limit,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("room", "live"),
    [
        (2 * (TABLE + STACK + SQUARE), TABLE + STACK + SQUARE),
        (2 * (TABLE + STACK), TABLE + STACK),
        (2 * TABLE + 2 * SQUARE, TABLE + SQUARE),
        (2 * SQUARE, SQUARE),
    ],
)
def test_as_many_as_there_is_room_for(room: int, live: int) -> None:
    trials: Any = MadeUp(room)
    found = with_room_filled(trials, CHOICE)
    assert found is not None
    assert found.choice == dataclasses.replace(CHOICE, live=live)
    assert trials.asked == [live]


def test_fewer_where_the_compiled_step_takes_more() -> None:
    """A stack that is held twice, perhaps."""
    trials: Any = MadeUp(2 * (TABLE + STACK + SQUARE), factor=2.0)
    found = with_room_filled(trials, CHOICE)
    assert found is not None
    assert trials.asked == [TABLE + STACK + SQUARE, found.choice.live]
    assert found.choice.live == TABLE


def test_fewer_where_xla_would_compute_values_again() -> None:
    trials: Any = MadeUp(2 * WHOLE, limit=WHOLE - 1)
    found = with_room_filled(trials, CHOICE)
    assert found is not None
    assert trials.asked == [WHOLE, found.choice.live]
    assert 0 < found.choice.live <= WHOLE // 2


@pytest.mark.parametrize(
    ("room", "choice"),
    [
        (-1, CHOICE),  # does not fit as it is
        (2 * SQUARE - 1, CHOICE),
        (10**9, Choice(stage=2, micro=1)),
        (10**9, Choice(stage=3, micro=1, offload="optimizer and parameters")),
        (10**9, dataclasses.replace(CHOICE, live=5)),  # given
    ],
)
def test_nothing_stays(room: int, choice: Choice) -> None:
    trials: Any = MadeUp(room)
    assert with_room_filled(trials, choice) is None
