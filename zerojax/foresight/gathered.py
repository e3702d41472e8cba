"""How many parameters may stay gathered over an update, by the forecast."""

from __future__ import annotations

import dataclasses
import math
import sys

from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trial, Trials

ALL = sys.maxsize
TRIES = 2


def weighed(trials: Trials, choice: Choice) -> tuple[Trial, ...]:
    """What may stay gathered over an update, each compiled, the fastest by the forecast first.

    Weighed are nothing, about half of what the devices have room for, and all of that. Room is no
    reason to fill it: gathers of what stays stand before the arithmetic that could hide them.

    Args:
      trials: The trials of the step on the devices.
      choice: One under which nothing stays gathered.

    Returns:
      Nothing where nothing may stay, or fits. Of equally fast ones what takes less comes first.
    """
    filled = with_room_filled(trials, choice)
    if filled is None:
        return ()
    found = [Trial(choice, trials.forecast(choice))]
    half = _fitting(trials, choice, trials.plan(filled.choice).live.bytes // 2)
    if 0 < half < filled.choice.live:
        some = dataclasses.replace(choice, live=half)
        forecast = trials.tried(some)
        if forecast is not None and forecast.fits:
            found.append(Trial(some, forecast))
    return tuple(sorted([*found, filled], key=lambda trial: trial.seconds))


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
