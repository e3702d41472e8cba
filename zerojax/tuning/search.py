"""Search for the settings that fit and are predicted to train fastest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from zerojax.foresight.attribution import ACTIVATIONS, BATCH, LOGITS
from zerojax.foresight.by_value import by_value
from zerojax.foresight.choice import OFFLOADS, Choice, Offload, Remat
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.gathered import TRIES, with_room_filled
from zerojax.foresight.trials import Trial, Trials
from zerojax.tuning.space import Space

COMPILES, SECONDS = 40, 1200.0
AS_FAST = 0.02
"""The difference of two step times, as a share, below which neither counts as faster."""
WAITS = 0.1
"""The share of a step that waits for the network from which pipeline stages are tried."""
REFINED = 2
"""Number of choices to try again with parameters that stay gathered."""


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
      ranking: The choices that fit, by descending rows per second, or by ascending step time if
        the metric of the space's bounds is "latency".
      unseen: The modes that the search skipped at its limits.
      leanest: The choice that needs the least memory.
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
) -> SearchResult:
    """Searches for the largest micro-batch of each mode (stage, remat, offload) that fits.

    The first compile of a mode shows which bytes grow with the micro-batch; the size at which they
    fill the memory is compiled next. The modes of an offload are tried only if their leanest, the
    highest stage with remat, fits at the smallest micro-batch. More offload is tried only if
    nothing fits with less, because its traffic over the host's link only costs time. The stage and
    the offload of the fastest choice are tried again with each policy of what blocks keep, and with
    the named values that are worth most (:mod:`zerojax.foresight.by_value`). If the fastest choice
    waits for the network, it is tried again in pipeline stages of hosts. If the config leaves open
    which parameters stay gathered at stage 3, the fastest choices are tried again with as many
    gathered parameters as fit.

    Args:
      trials: The trials of the step on the devices.
      space: The settings that may be chosen.
      compiles: The maximum number of choices to compile; cached programs do not count.
      seconds: The maximum duration of the search, in seconds.
      done: A function called with the number of modes that are done, and their total.
    """
    bounds = space.batches.bounds
    shortest = bounds is not None and bounds.metric == "latency"
    modes, sizes = list(space.modes()), space.batches.sizes()
    # The last mode of each offload needs the least memory.
    leanest = {mode.offload: space.batches.choice(mode, sizes[0]) for mode in modes}
    leanest_mode = [*leanest.values()][-1]
    at_most = bounds.num_tuning_micro_batch_sizes if bounds else len(sizes)
    limits, infeasible = _Limits(trials, compiles, seconds), set[Offload]()
    fitting: dict[Choice, Trial] = {}
    for index, mode in enumerate(modes):
        done(index, len(modes))
        if mode.offload in infeasible or any(_offloads_less(other, mode) for other in fitting):
            continue
        try:
            least = leanest[mode.offload]
            if (forecast := limits.fitting(least)) is None:
                infeasible.add(mode.offload)
                continue
            fitting[least] = Trial(least, forecast)
            for trial in _of_mode(limits, space, mode, sizes, at_most):
                fitting[trial.choice] = trial
        except TimeoutError:
            unseen = [
                other
                for other in modes[index:]
                if other.offload not in infeasible
                and not any(_offloads_less(x, other) for x in fitting)
            ]
            return SearchResult(ranked(fitting.values(), shortest), unseen, leanest_mode)
    unseen = []
    if space.policies and fitting:
        unseen = _keep_more(limits, space, fitting, at_most, shortest)
    if space.pipelines and fitting:
        unseen += _in_stages(limits, space, fitting, shortest)
    if space.live is None:
        fastest = [x.choice for x in ranked(fitting.values(), shortest) if x.choice.drops]
        for choice in fastest[:REFINED]:
            if limits.compiles < TRIES or limits.over:
                break
            if (filled := with_room_filled(trials, choice)) is not None:
                fitting[filled.choice] = filled
            limits.compiles -= TRIES
    done(len(modes), len(modes))
    return SearchResult(ranked(fitting.values(), shortest), unseen, leanest_mode)


class _Limits:
    """Trials within the limits of a search.

    Attributes:
      compiles: The number of choices that may still be compiled.
    """

    def __init__(self, trials: Trials, compiles: int, seconds: float) -> None:
        self.trials, self.compiles = trials, compiles
        self._until = time.monotonic() + seconds
        self._known: dict[Choice, Forecast | None] = {}

    @property
    def over(self) -> bool:
        return self.compiles <= 0 or time.monotonic() >= self._until

    def has_tried(self, remat: Remat) -> bool:
        return any(choice.remat == remat for choice in self._known)

    def fitting(self, choice: Choice) -> Forecast | None:
        """Returns a choice's forecast, or None if an estimate or a compile shows it does not fit.

        Raises:
          TimeoutError: The choice must be compiled, and the limits do not allow another compile.
        """
        if choice not in self._known and not self.trials.hopeless(choice):
            if self.over:
                raise TimeoutError
            forecast = self.trials.tried(choice)
            self.compiles -= forecast is None or forecast.compile_seconds > 0
            self._known[choice] = forecast if forecast and forecast.fits else None
        return self._known.get(choice)


def _keep_more(
    limits: _Limits, space: Space, fitting: dict[Choice, Trial], at_most: int, shortest: bool
) -> list[Choice]:
    """Tries the policies of what blocks keep with the stage and the offload of the fastest choice,
    and named values with its micro-batch.

    Adds the trials that fit to ``fitting``.

    Returns:
      The modes that the search skipped at its limits.
    """
    fastest = ranked(fitting.values(), shortest)[0].choice
    modes = [dataclasses.replace(fastest, remat=name) for name in space.policies]
    try:
        for mode in modes:
            for trial in _of_mode(limits, space, mode, space.batches.sizes(), at_most):
                fitting[trial.choice] = trial
        fastest = ranked(fitting.values(), shortest)[0].choice
        least = dataclasses.replace(fastest, remat=True)
        for trial in by_value(limits.fitting, least, limits.trials.names(least)):
            fitting[trial.choice] = trial
    except TimeoutError:
        modes.append(dataclasses.replace(fastest, remat="names:..."))
        return [mode for mode in modes if not limits.has_tried(mode.remat)]
    return []


def _in_stages(
    limits: _Limits, space: Space, fitting: dict[Choice, Trial], shortest: bool
) -> list[Choice]:
    """Tries the fastest choice in pipeline stages, also at ZeRO's stage 1, if it waits for the
    network. Adds the trials that fit to ``fitting``; returns the modes skipped at the limits."""
    fastest = ranked(fitting.values(), shortest)[0]
    if fastest.forecast.network_share < WAITS:
        return []
    stages = dict.fromkeys([fastest.choice.stage, *(n for n in space.stages if n == 1)])
    staged = (space.batches.in_stages(fastest.choice, n) for n in space.pipelines)
    modes = [dataclasses.replace(each, stage=stage) for each in staged for stage in stages]
    for i, mode in enumerate(modes):
        try:
            if forecast := limits.fitting(mode):
                fitting[mode] = Trial(mode, forecast)
        except TimeoutError:
            return modes[i:]
    return []


def _of_mode(
    limits: _Limits, space: Space, mode: Choice, sizes: Sequence[int], at_most: int
) -> Iterator[Trial]:
    """Tries up to ``at_most`` micro-batches of a mode, and yields those that fit.

    If XLA computes values again in the largest, also the largest that leaves XLA enough memory.

    Raises:
      TimeoutError: The search reached its limits.
    """
    low, high, index = 0, len(sizes), 0  # sizes before low fit, sizes from high on do not
    tried: set[int] = set()
    for _ in range(at_most):
        if index in tried:
            break
        tried.add(index)
        choice = space.batches.choice(mode, sizes[index])
        if forecast := limits.fitting(choice):
            yield Trial(choice, forecast)
            low = index + 1
            if forecast.recomputes and forecast.recomputes_above:
                limit = forecast.recomputes_above
                index = _largest_fitting(forecast, sizes[index], sizes, limit)
                continue
            index = _largest_fitting(forecast, sizes[index], sizes, limits.trials.rates.room)
            if index < low:
                break  # the next size exceeds the memory by more than the estimate's error
        else:
            high = index
        index = min(index, high - 1)
        if low >= high:
            break


def ranked(trials: Iterable[Trial], shortest: bool = False) -> list[Trial]:
    """Sorts trials by descending rows per second, or by ascending step time if ``shortest``.

    If XLA computes values again to save memory in the fastest, the fastest of the others comes
    first, unless it is slower by more than :data:`AS_FAST`: where XLA begins to do so depends on
    its version and on the memory that is free.
    """

    def pace(x: Trial) -> float:
        rows = x.choice.micro * x.choice.accumulation / x.choice.pipeline
        return x.seconds / (1 if shortest else rows)

    order = sorted(trials, key=pace)
    steady = next((x for x in order if not x.forecast.recomputes), None)
    if steady is not None and pace(steady) <= (1 + AS_FAST) * pace(order[0]):
        order.remove(steady)
        order.insert(0, steady)
    return order


def listed(modes: Sequence[Choice]) -> str:
    """Formats modes for a message, at most eight of them."""
    names = [str(dataclasses.replace(mode, micro=1)) for mode in modes]
    names = [name.replace(", micro-batch 1", "") for name in names]
    return "; ".join(names[:8]) + f"; and {len(names) - 8} more" * (len(names) > 8)


def _offloads_less(fitting: Choice, mode: Choice) -> bool:
    """Returns whether a choice that fits offloads less than a mode."""
    return OFFLOADS.index(fitting.offload) < OFFLOADS.index(mode.offload)


def _largest_fitting(forecast: Forecast, micro: int, sizes: Sequence[int], room: int) -> int:
    """Returns the index of the largest micro-batch that should fit; scales the bytes that grow."""
    batch_bytes = [
        sum(program.memory.get(kind, 0) for kind in (ACTIVATIONS, LOGITS, BATCH))
        for program in forecast.programs
    ]

    def fits(size: int) -> bool:
        pairs = zip(forecast.programs, batch_bytes, strict=True)
        return all(
            program.bytes + growing * (size / micro - 1) <= room for program, growing in pairs
        )

    return max((index for index, size in enumerate(sizes) if fits(size)), default=0)
