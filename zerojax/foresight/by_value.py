"""A forecast-based choice of the named values that rematerialised blocks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.trials import Trial


def by_value(
    fitting: Callable[[Choice], Forecast | None], choice: Choice, names: Sequence[str]
) -> Iterator[Trial]:
    """Yields trials with named values kept: each name for itself, then the best set that has room.

    A name's value is the time of a step that its values save, divided by the memory that they take,
    as compiled. The names with the highest values are kept, as long as they fit into the memory
    that ``choice`` leaves free below the size at which XLA would compute values again. XLA's own
    estimate of a program may exceed its memory: if XLA computes values again in that set, the next
    set takes half the memory.

    Args:
      fitting: Returns the forecast of a choice, or None if the choice does not fit.
      choice: A choice under which blocks keep only their input.
      names: Names of values that blocks compute again, from :meth:`Trials.names`.
    """
    base = fitting(choice)
    if base is None or base.spare <= 0:
        return
    costs: dict[str, tuple[float, int]] = {}  # name -> seconds saved, bytes added
    for name in names:
        only = _keeping(choice, [name])
        if (forecast := fitting(only)) is None:
            continue
        yield Trial(only, forecast)
        if (saved := base.seconds - forecast.seconds) > 0:
            costs[name] = saved, max(forecast.peak.bytes - base.peak.bytes, 1)
    room = base.spare
    while len(kept := _most_valuable(costs, room)) > 1:
        together = _keeping(choice, kept)
        if (forecast := fitting(together)) is not None:
            yield Trial(together, forecast)
            if not forecast.recomputes:
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
