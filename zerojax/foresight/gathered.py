"""A forecast-based choice of how many parameters stay gathered over an update."""

from __future__ import annotations

import dataclasses
import math
import sys

from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trial, Trials

ALL = sys.maxsize
TRIES = 2


def with_room_filled(trials: Trials, choice: Choice) -> Trial | None:
    """Finds a choice with as many parameters gathered over an update as the devices have room for.

    The memory that ``choice`` leaves free, below the size at which XLA would compute values again,
    gives the first amount. That amount is compiled; if it takes more memory than was free, the next
    try reduces the amount in proportion, or to a half if XLA computes values again.

    Args:
      trials: The trials of the step on the devices.
      choice: A choice under which nothing stays gathered.

    Returns:
      The choice and its forecast, or None if no parameter may stay gathered, or none fits.
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
        if forecast.fits and forecast.spare >= 0 and not forecast.recomputes:
            return Trial(larger, forecast)
        # XLA's own estimate may exceed what the program takes.
        room = room // 2 if forecast.spare >= 0 else room * room // (room - forecast.spare)
    return None


def _fitting(trials: Trials, choice: Choice, room: int) -> int:
    """Returns the elements of parameters, taken largest first, that fit into ``room`` bytes."""
    elements = 0
    eligible = trials.plan(dataclasses.replace(choice, live=ALL)).live.leaves
    for leaf in sorted(eligible, key=lambda leaf: math.prod(leaf.shape), reverse=True):
        if leaf.bytes_per_device <= room:
            room -= leaf.bytes_per_device
            elements += math.prod(leaf.shape)
    return elements
