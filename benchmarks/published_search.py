"""The largest micro-batch that fits, in few compiles.

    found = find_largest(study, Choice(stage=2, micro=1), start=8)
    found.micro, found.row_bytes

The peak is nearly affine in the micro-batch, so two compiles show roughly where the limit is. What
is named the largest was compiled and fits; one row more was compiled and does not.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Forecast

GUESSES = 6  # after which the interval is halved, whatever the line through the last two says


class Forecasts(Protocol):
    """A :class:`zerojax.tuning.study.Study`, as far as the search needs it."""

    def forecast(self, choice: Choice) -> Forecast: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The outcome of a search.

    Attributes:
      micro: the largest micro-batch that fits, 0 where not even one row does.
      fitting: its forecast; None where nothing fits.
      above: the forecast of one row more.
      row_bytes: what a row more takes at the peak, from the two compiles farthest apart.
      compiled: the micro-batches that were.
    """

    micro: int
    fitting: Forecast | None
    above: Forecast
    row_bytes: float
    compiled: tuple[int, ...]


def find_largest(study: Forecasts, choice: Choice, *, start: int) -> Largest:
    """Search the largest micro-batch, all else as chosen.

    Args:
      study: of the model and the devices.
      choice: whose micro-batch does not matter.
      start: the first to compile; the second is twice or half of it.

    Raises:
      ValueError: ``start`` is below 1.
    """
    if start < 1:
        raise ValueError(f"start={start}: give the micro-batch to begin with, 1 or more")
    known: dict[int, Forecast] = {}
    wanted = start
    while True:
        known[wanted] = study.forecast(dataclasses.replace(choice, micro=wanted))
        low = max((n for n, forecast in known.items() if forecast.fits), default=0)
        high = min((n for n, forecast in known.items() if not forecast.fits), default=None)
        if high is not None and high - low <= 1:
            break
        wanted = _next(known, low, high)
    return Largest(
        micro=low,
        fitting=known.get(low),
        above=known[high],
        row_bytes=_slope(min(known), max(known), known) if len(known) > 1 else 0.0,
        compiled=tuple(known),
    )


def _next(known: Mapping[int, Forecast], low: int, high: int | None) -> int:
    """A size between the largest that fits and the smallest that does not."""
    if len(known) < 2 or (high is not None and len(known) > GUESSES):
        return 2 * low if high is None else (low + high) // 2
    room = next(iter(known.values())).rates.room
    near = sorted(known, key=lambda n: abs(known[n].peak.bytes - room))[:2]
    slope = _slope(min(near), max(near), known)
    if slope <= 0:
        return 2 * low if high is None else (low + high) // 2
    guess = near[0] + int((room - known[near[0]].peak.bytes) // slope)
    return max(low + 1, min(guess, 4 * max(low, 1) if high is None else high - 1))


def _slope(less: int, more: int, known: Mapping[int, Forecast]) -> float:
    return (known[more].peak.bytes - known[less].peak.bytes) / (more - less)
