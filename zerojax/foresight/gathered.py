"""How many parameters may stay gathered over an update, by the forecast."""

from __future__ import annotations

import dataclasses
import math
import sys

from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trial, Trials

ALL = sys.maxsize
TRIES = 2


def with_room_filled(trials: Trials, choice: Choice) -> Trial | None:
    """A choice with as many parameters gathered over an update as the devices have room for.

    The memory that the choice leaves free tells how many that should be, short of where XLA would
    compute values again. They are compiled; where they take more than that, fewer are, in
    proportion.

    Args:
      trials: The trials of the step on the devices.
      choice: One under which nothing stays gathered.

    Returns:
      None where nothing may stay, or fits.
    """
    if not choice.drops or choice.live:
        return None
    base = trials.tried(choice)
    if base is None or not base.fits:
        return None
    room = base.spare
    for _ in range(TRIES):
        larger = dataclasses.replace(choice, live=_fitting(trials, choice, room))
        if not larger.live:
            return None
        forecast = trials.tried(larger)
        if forecast is None:
            return None
        if forecast.fits and forecast.spare >= 0:
            return Trial(larger, forecast)
        room = room * room // (room - forecast.spare)
    return None


def _fitting(trials: Trials, choice: Choice, room: int) -> int:
    """Elements of the parameters that may stay gathered in so many bytes, the largest first."""
    elements = 0
    able = trials.plan(dataclasses.replace(choice, live=ALL)).live.leaves
    for leaf in sorted(able, key=lambda leaf: math.prod(leaf.shape), reverse=True):
        if leaf.bytes_per_device <= room:
            room -= leaf.bytes_per_device
            elements += math.prod(leaf.shape)
    return elements
