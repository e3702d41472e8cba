"""The search for the settings that fit and are predicted to train fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zerojax.foresight.attribution import ACTIVATIONS, BATCH, LOGITS
from zerojax.foresight.choice import OFFLOADS, Choice
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.gathered import TRIES, with_room_filled
from zerojax.foresight.trials import Trial, Trials
from zerojax.tuning.space import Space

COMPILES, SECONDS = 40, 1200.0
REFINED = 2
"""How many choices are tried again with parameters that stay gathered."""


def search(
    trials: Trials,
    space: Space,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
    done: Callable[[int, int], None] = lambda modes, of: None,
) -> list[Trial]:
    """The choices that fit, most rows a second first; by the metric "latency" of the space's bounds
    the shortest step first.

    The search looks for the largest micro-batch of each mode (stage, remat, offload): the first
    compile tells which bytes grow with the micro-batch, and the size at which they fill the memory
    is compiled next. A mode with more offload is tried only where nothing fits with less: its
    traffic over the host's link would buy nothing. Where the config leaves open what stays gathered
    at stage 3, the fastest choices are tried again with as much of that as fits.

    Args:
      trials: The trials of the step on the devices.
      space: The settings that may be chosen.
      compiles: How many choices are compiled at the most; what a cache remembers is no compile.
      seconds: How long the search takes at the most, in seconds.
      done: Called with how many modes are done, and how many there are.
    """
    fitting: list[Trial] = []
    bounds = space.bounds
    shortest = bounds is not None and bounds.metric == "latency"
    modes, sizes = list(space.modes()), space.sizes()
    left, until = compiles, time.monotonic() + seconds
    for at, mode in enumerate(modes):
        done(at, len(modes))
        if any(_less(each.choice, mode) for each in fitting):
            continue
        low, high, at_size = 0, len(sizes), 0  # sizes below low fit, those from high on do not
        most = bounds.num_tuning_micro_batch_sizes if bounds else len(sizes)
        while low < high and most:
            most -= 1
            if not left or time.monotonic() >= until:
                return ranked(fitting, shortest)
            choice = space.choice(mode, sizes[at_size])
            if trials.hopeless(choice):
                high = at_size
            else:
                forecast = trials.tried(choice)
                left -= forecast is None or forecast.compile_seconds > 0
                if forecast and forecast.fits:
                    fitting.append(Trial(choice, forecast))
                    low = at_size + 1
                    at_size = _fills(forecast, sizes[at_size], sizes, trials.rates.room)
                    if at_size < low:
                        break  # the next size exceeds the memory by far more than the estimate errs
                else:
                    high = at_size
            at_size = min(at_size, high - 1)
    if space.live is None:
        fastest = [each.choice for each in ranked(fitting, shortest) if each.choice.drops][:REFINED]
        for choice in fastest:
            if left < TRIES or time.monotonic() >= until:
                break
            filled = with_room_filled(trials, choice)
            left -= TRIES
            fitting += [filled] if filled else []
    done(len(modes), len(modes))
    return ranked(fitting, shortest)


def ranked(trials: Sequence[Trial], shortest: bool = False) -> list[Trial]:
    """The trials, most rows a second first, or the shortest step first."""
    return sorted(
        trials,
        key=lambda x: x.seconds / (1 if shortest else x.choice.micro * x.choice.accumulation),
    )


def _less(fitting: Choice, mode: Choice) -> bool:
    """Whether a choice that fits offloads less than a mode."""
    return OFFLOADS.index(fitting.offload) < OFFLOADS.index(mode.offload)


def _fills(forecast: Forecast, micro: int, sizes: Sequence[int], room: int) -> int:
    """The position of the largest micro-batch that should fit, by the bytes that grow with it."""
    grows = sum(forecast.peak.memory.get(kind, 0) for kind in (ACTIVATIONS, LOGITS, BATCH))
    fixed = forecast.peak.bytes - grows
    return max(
        (at for at, size in enumerate(sizes) if fixed + grows * size / micro <= room), default=0
    )
