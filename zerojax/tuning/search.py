"""Search for the settings that fit and are predicted to train fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from zerojax.foresight.attribution import ACTIVATIONS, BATCH, LOGITS
from zerojax.foresight.by_value import by_value
from zerojax.foresight.choice import OFFLOADS, Choice, Offload
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


NAMES = "names:..."
"""The name for what blocks keep by value, before the values are known."""


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
    modes, smallest = list(space.modes()), space.batches.sizes()[0]
    # The last mode of each offload needs the least memory.
    leanest = {mode.offload: space.batches.choice(mode, smallest) for mode in modes}
    infeasible = set[Offload]()
    trials.limit(compiles, seconds)

    def is_open(mode: Choice) -> bool:
        offload = OFFLOADS.index(mode.offload)
        return mode.offload not in infeasible and not any(
            OFFLOADS.index(fitting.offload) < offload for fitting in trials.fitted
        )

    def attempt(mode: Choice) -> None:
        done(modes.index(mode), len(modes))
        if is_open(mode):
            if trials.fitting(leanest[mode.offload]) is None:
                infeasible.add(mode.offload)
            else:
                _try_mode(trials, space, mode)

    skipped = _within_limits(attempt, modes)
    unseen = [mode for mode in skipped if is_open(mode)]
    if not skipped:
        if trials.fitted:
            unseen = _keep_more(trials, space) + _in_stages(trials, space)
            _gather_more(trials, space)
        done(len(modes), len(modes))
    return SearchResult(_ranking(trials, space), unseen, [*leanest.values()][-1])


def _keep_more(trials: Trials, space: Space) -> list[Choice]:
    """Tries the policies of what blocks keep with the stage and the offload of the fastest choice,
    and named values with its micro-batch; returns the modes skipped at the limits."""
    if not space.policies:
        return []
    fastest = _ranking(trials, space)[0].choice

    def attempt(mode: Choice) -> None:
        if mode.remat != NAMES:
            _try_mode(trials, space, mode)
        else:
            by_value(trials, dataclasses.replace(_ranking(trials, space)[0].choice, remat=True))

    policies = (*space.policies, NAMES)
    return _within_limits(attempt, [dataclasses.replace(fastest, remat=x) for x in policies])


def _in_stages(trials: Trials, space: Space) -> list[Choice]:
    """Tries the fastest choice in pipeline stages, also at ZeRO's stage 1, if it waits for the
    network; returns the modes skipped at the limits."""
    fastest = _ranking(trials, space)[0]
    if fastest.forecast.network_share < WAITS:
        return []
    stages = dict.fromkeys([fastest.choice.stage, *(n for n in space.stages if n == 1)])
    staged = (space.batches.in_stages(fastest.choice, n) for n in space.pipelines)
    modes = [dataclasses.replace(each, stage=stage) for each in staged for stage in stages]
    return _within_limits(trials.fitting, modes)


def _within_limits(attempt: Callable[[Choice], object], modes: Sequence[Choice]) -> list[Choice]:
    """Tries modes in order; returns those skipped at the limits of the search."""
    for i, mode in enumerate(modes):
        try:
            attempt(mode)
        except TimeoutError:
            return [*modes[i:]]
    return []


def _gather_more(trials: Trials, space: Space) -> None:
    """Tries the fastest choices with as many gathered parameters as fit, if the space leaves that
    open."""
    if space.live is not None:
        return
    fastest = [x.choice for x in _ranking(trials, space) if x.choice.drops]
    for choice in fastest[:REFINED]:
        if trials.compiles < TRIES or trials.over:
            break
        if (filled := with_room_filled(trials, choice)) is not None:
            trials.fitted[filled.choice] = filled
        trials.compiles -= TRIES


def _try_mode(trials: Trials, space: Space, mode: Choice) -> None:
    """Tries micro-batches of a mode, as many as the space allows, up to the largest that fits.

    If XLA computes values again in the largest, also the largest that leaves XLA enough memory.

    Raises:
      TimeoutError: The search reached its limits.
    """
    sizes, bounds = space.batches.sizes(), space.batches.bounds
    low, high, index = 0, len(sizes), 0  # sizes before low fit, sizes from high on do not
    tried: set[int] = set()
    for _ in range(bounds.num_tuning_micro_batch_sizes if bounds else len(sizes)):
        if index in tried:
            break
        tried.add(index)
        choice = space.batches.choice(mode, sizes[index])
        if forecast := trials.fitting(choice):
            low = index + 1
            if forecast.recomputes and forecast.recomputes_above:
                limit = forecast.recomputes_above
                index = _largest_fitting(forecast, sizes[index], sizes, limit)
                continue
            index = _largest_fitting(forecast, sizes[index], sizes, trials.rates.room)
            if index < low:
                break  # the next size exceeds the memory by more than the estimate's error
        else:
            high = index
        index = min(index, high - 1)
        if low >= high:
            break


def _ranking(trials: Trials, space: Space) -> list[Trial]:
    bounds = space.batches.bounds
    return ranked(trials.fitted.values(), bounds is not None and bounds.metric == "latency")


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
