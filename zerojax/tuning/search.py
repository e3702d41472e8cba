"""The search for the settings that fit and are predicted to train fastest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from zerojax.foresight.attribution import ACTIVATIONS, BATCH, LOGITS
from zerojax.foresight.choice import OFFLOADS, Choice, Offload
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.gathered import TRIES, with_room_filled
from zerojax.foresight.trials import Trial, Trials
from zerojax.tuning.space import Space

COMPILES, SECONDS = 40, 1200.0
REFINED = 2
"""How many choices are tried again with parameters that stay gathered."""


class Searched(NamedTuple):
    """The result of a search.

    Attributes:
      ranking: The choices that fit, most rows a second first; by the metric "latency" of the
        space's bounds the shortest step first.
      unseen: The modes that the limits of the search left out.
      leanest: The choice that needs the least memory of all.
    """

    ranking: list[Trial]
    unseen: list[Choice]
    leanest: Choice


def search(
    trials: Trials,
    space: Space,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
    done: Callable[[int, int], None] = lambda modes, of: None,
) -> Searched:
    """Searches for the largest micro-batch of each mode (stage, remat, offload) that fits.

    The first compile of a mode tells which bytes grow with the micro-batch, and the size at which
    they fill the memory is compiled next. The modes of an offload are tried only where the leanest
    of them, the highest stage with remat, fits at the smallest micro-batch; and those of a further
    offload only where nothing fits with less: its traffic over the host's link would buy nothing.
    Where the config leaves open what stays gathered at stage 3, the fastest choices are tried again
    with as much of that as fits.

    Args:
      trials: The trials of the step on the devices.
      space: The settings that may be chosen.
      compiles: How many choices are compiled at the most; what a cache remembers is no compile.
      seconds: How long the search takes at the most, in seconds.
      done: Called with how many modes are done, and how many there are.
    """
    bounds = space.bounds
    shortest = bounds is not None and bounds.metric == "latency"
    modes, sizes = list(space.modes()), space.sizes()
    leanest = {mode.offload: space.choice(mode, sizes[0]) for mode in modes}  # the last of each
    last = [*leanest.values()][-1]
    at_most = bounds.num_tuning_micro_batch_sizes if bounds else len(sizes)
    limits, in_vain = _Limits(trials, compiles, seconds), set[Offload]()
    fitting: dict[Choice, Trial] = {}
    for at, mode in enumerate(modes):
        done(at, len(modes))
        if mode.offload in in_vain or any(_less(each, mode) for each in fitting):
            continue
        try:
            least = leanest[mode.offload]
            if (forecast := limits.fitting(least)) is None:
                in_vain.add(mode.offload)
                continue
            fitting[least] = Trial(least, forecast)
            for trial in _of_mode(limits, space, mode, sizes, at_most):
                fitting[trial.choice] = trial
        except TimeoutError:
            unseen = [
                each
                for each in modes[at:]
                if each.offload not in in_vain and not any(_less(x, each) for x in fitting)
            ]
            return Searched(ranked(fitting.values(), shortest), unseen, last)
    if space.live is None:
        fastest = [x.choice for x in ranked(fitting.values(), shortest) if x.choice.drops]
        for choice in fastest[:REFINED]:
            if limits.compiles < TRIES or limits.over:
                break
            if (filled := with_room_filled(trials, choice)) is not None:
                fitting[filled.choice] = filled
            limits.compiles -= TRIES
    done(len(modes), len(modes))
    return Searched(ranked(fitting.values(), shortest), [], last)


class _Limits:
    """Trials within the limits of a search.

    Attributes:
      compiles: How many choices may still be compiled.
    """

    def __init__(self, trials: Trials, compiles: int, seconds: float) -> None:
        self.trials, self.compiles = trials, compiles
        self._until = time.monotonic() + seconds
        self._known: dict[Choice, Forecast | None] = {}

    @property
    def over(self) -> bool:
        return self.compiles <= 0 or time.monotonic() >= self._until

    def fitting(self, choice: Choice) -> Forecast | None:
        """The forecast of a choice; None where it does not fit, by an estimate or a compile.

        Raises:
          TimeoutError: It would have to be compiled, and the limits do not allow that.
        """
        if choice not in self._known and not self.trials.hopeless(choice):
            if self.over:
                raise TimeoutError
            forecast = self.trials.tried(choice)
            self.compiles -= forecast is None or forecast.compile_seconds > 0
            self._known[choice] = forecast if forecast and forecast.fits else None
        return self._known.get(choice)


def _of_mode(
    limits: _Limits, space: Space, mode: Choice, sizes: Sequence[int], at_most: int
) -> Iterator[Trial]:
    """The micro-batches of a mode that fit, of those that are tried.

    Raises:
      TimeoutError: The limits of the search are reached.
    """
    low, high, at = 0, len(sizes), 0  # sizes below low fit, those from high on do not
    for _ in range(at_most):
        choice = space.choice(mode, sizes[at])
        if forecast := limits.fitting(choice):
            yield Trial(choice, forecast)
            low = at + 1
            at = _fills(forecast, sizes[at], sizes, limits.trials.rates.room)
            if at < low:
                break  # the next size exceeds the memory by far more than the estimate errs
        else:
            high = at
        at = min(at, high - 1)
        if low >= high:
            break


def ranked(trials: Iterable[Trial], shortest: bool = False) -> list[Trial]:
    """The trials, most rows a second first, or the shortest step first."""
    return sorted(
        trials,
        key=lambda x: x.seconds / (1 if shortest else x.choice.micro * x.choice.accumulation),
    )


def listed(modes: Sequence[Choice]) -> str:
    """The modes for a message, the first eight."""
    names = [str(dataclasses.replace(mode, micro=1)) for mode in modes]
    names = [name.replace(", micro-batch 1", "") for name in names]
    return "; ".join(names[:8]) + f"; and {len(names) - 8} more" * (len(names) > 8)


def _less(fitting: Choice, mode: Choice) -> bool:
    """Whether a choice that fits offloads less than a mode."""
    return OFFLOADS.index(fitting.offload) < OFFLOADS.index(mode.offload)


def _fills(forecast: Forecast, micro: int, sizes: Sequence[int], room: int) -> int:
    """The position of the largest micro-batch that should fit, by the bytes that grow with it."""
    grows = [
        sum(program.memory.get(kind, 0) for kind in (ACTIVATIONS, LOGITS, BATCH))
        for program in forecast.programs
    ]

    def fits(size: int) -> bool:
        each = zip(forecast.programs, grows, strict=True)
        return all(program.bytes + grown * (size / micro - 1) <= room for program, grown in each)

    return max((at for at, size in enumerate(sizes) if fits(size)), default=0)
