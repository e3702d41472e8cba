"""A forecast-based choice of the named values that rematerialised blocks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trials


def by_value(trials: Trials, choice: Choice) -> None:
    """Tries to keep named values: each name for itself, then the best set that has room.

    A name's value is the time of a step that its values save, divided by the memory that they take,
    as compiled. The names with the highest values are kept, as long as they fit into the memory
    that ``choice`` leaves free below the size at which XLA would compute values again. XLA's own
    estimate of a program may exceed its memory: if XLA computes values again in that set, the next
    set takes half the memory.

    Args:
      trials: The trials of the step; ``fitted`` has those that fit.
      choice: A choice under which blocks keep only their input.

    Raises:
      TimeoutError: The search reached its limits.
    """
    base = trials.fitting(choice)
    if base is None or base.spare <= 0:
        return
    costs: dict[str, tuple[float, int]] = {}  # name -> seconds saved, bytes added
    for name in trials.names(choice):
        if (forecast := trials.fitting(_keeping(choice, [name]))) is None:
            continue
        if (saved := base.seconds - forecast.seconds) > 0:
            costs[name] = saved, max(forecast.peak.bytes - base.peak.bytes, 1)
    room = base.spare
    while len(kept := _most_valuable(costs, room)) > 1:
        forecast = trials.fitting(_keeping(choice, kept))
        if forecast is not None and not forecast.recomputes:
            return
        room = sum(costs[name][1] for name in kept) // 2


def _most_valuable(costs: Mapping[str, tuple[float, int]], room: int) -> list[str]:
    """Returns the names with the most seconds saved for each byte that fit into ``room`` bytes."""
    kept = []
    for name, (_, added) in sorted(costs.items(), key=lambda item: -item[1][0] / item[1][1]):
        if added <= room:
            kept.append(name)
            room -= added
    return kept


def _keeping(choice: Choice, names: Sequence[str]) -> Choice:
    return dataclasses.replace(choice, remat=f"names:{','.join(names)}")
