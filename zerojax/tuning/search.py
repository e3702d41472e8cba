"""The search for the settings that train fastest, by prediction, of those that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zerojax.foresight.attribution import ACTIVATIONS, BATCH, LOGITS
from zerojax.foresight.choice import OFFLOADS, Choice
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.trials import Trial, Trials
from zerojax.tuning.space import Space

COMPILES, SECONDS = 40, 1200.0


def search(
    study: Trials,
    space: Space,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
    done: Callable[[int, int], None] = lambda modes, of: None,
) -> list[Trial]:
    """Search for the choice with the most tokens a second that fits.

    Of each mode (stage, remat, offload) the largest micro-batch is looked for: the first compile
    tells what grows with it, and the size at which that fills the memory is compiled. Offload is
    tried only where nothing fits without it, or with less: what it moves over the host's link it
    would only move for nothing.

    Args:
      study: of the step and the devices.
      space: what may be chosen.
      compiles, seconds: where the search ends, with what it has found. What a cache remembers is
        no compile.
      done: told how many modes have been looked at, of how many; not of all where it ends before.

    Returns:
      All that fit and were compiled, most rows a second first.
    """
    found: list[Trial] = []
    modes, sizes = list(space.modes()), space.sizes()
    left, until = compiles, time.monotonic() + seconds
    for at, mode in enumerate(modes):
        done(at, len(modes))
        if any(_less(each.choice, mode) for each in found):
            continue
        low, high, at_size = 0, len(sizes), 0  # below low all fit, from high on none does
        while low < high:
            if not left or time.monotonic() >= until:
                return _ranked(found)
            choice = space.choice(mode, sizes[at_size])
            if study.hopeless(choice):
                high = at_size
            else:
                forecast = study.tried(choice)
                left -= forecast is None or forecast.compile_seconds > 0
                if forecast and forecast.fits:
                    found.append(Trial(choice, forecast))
                    low = at_size + 1
                    at_size = _fills(forecast, sizes[at_size], sizes, study.rates.room)
                    if at_size < low:
                        break  # the next would not fit, by far more than the estimate errs
                else:
                    high = at_size
            at_size = min(at_size, high - 1)
    done(len(modes), len(modes))
    return _ranked(found)


def _ranked(found: Sequence[Trial]) -> list[Trial]:
    return sorted(
        found, key=lambda x: x.forecast.seconds / (x.choice.micro * x.choice.accumulation)
    )


def _less(found: Choice, mode: Choice) -> bool:
    return OFFLOADS.index(found.offload) < OFFLOADS.index(mode.offload)


def _fills(forecast: Forecast, micro: int, sizes: Sequence[int], room: int) -> int:
    """The position of the largest micro-batch that should fit, by what grows with it."""
    grows = sum(forecast.peak.memory.get(kind, 0) for kind in (ACTIVATIONS, LOGITS, BATCH))
    fixed = forecast.peak.bytes - grows
    return max(
        (at for at, size in enumerate(sizes) if fixed + grows * size / micro <= room), default=0
    )
