"""A search for settings with which a step fits; each candidate is compiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from zerojax.foresight.choice import OFFLOADS, TRIED, Choice, Remat
from zerojax.foresight.trials import Trial, Trials

COMPILES = 8


def remedies(trials: Trials, wanted: int = 3, compiles: int = COMPILES) -> list[Trial]:
    """Returns choices for the same rows that fit, in ascending order of predicted time.

    Milder choices are tried first: no parameters that stay gathered, then higher stages (the next
    one first), remat, smaller micro-batches, offload. A choice is skipped if it goes at least as
    far in every setting as a choice that fits, or if earlier forecasts show that it cannot fit.

    Args:
      trials: The trials of the step on the devices.
      wanted: The number of remedies after which the search ends.
      compiles: The most choices that are compiled.
    """
    fitting: list[Trial] = []
    tried = 0
    for choice in milder_first(trials.given, stays=bool(trials.plan(trials.given).live)):
        if len(fitting) == wanted or tried == compiles:
            break
        if any(_is_further(choice, each.choice) for each in fitting) or trials.hopeless(choice):
            continue
        tried += 1
        forecast = trials.tried(choice)
        if forecast and forecast.fits:
            fitting.append(Trial(choice, forecast))
    return sorted(fitting, key=lambda remedy: remedy.forecast.seconds)


def milder_first(given: Choice, stays: bool = True) -> Iterator[Choice]:
    """Returns the choices that go further than ``given`` in some setting and less far in none,
    mildest first.

    Args:
      given: The choice that does not fit.
      stays: Whether some parameter stays gathered under ``given``.
    """
    stages = range(given.stage, 4)
    remats: Sequence[Remat] = [given.remat, *([] if given.remat in (None, True) else [True])]
    micros = [n for n in range(given.micro, 0, -1) if given.micro % n == 0]
    further = OFFLOADS[OFFLOADS.index(given.offload) + 1 :]
    offloads = [given.offload, *(each for each in TRIED if each in further)]
    lives = [given.live, 0] if stays else [given.live]
    choices = {
        Choice(
            stage=stage,
            micro=micro,
            accumulation=given.accumulation * (given.micro // micro),
            remat=remat,
            offload=offload,
            live=live,
        )
        for offload, micro, remat, stage, live in itertools.product(
            offloads, micros, remats, stages, lives
        )
    }
    return (
        each for each in sorted(choices, key=_severity(given)) if each != given and each.possible
    )


def _severity(given: Choice) -> Callable[[Choice], tuple[float, ...]]:
    def severity(choice: Choice) -> tuple[float, ...]:
        steps = (
            (choice.live < given.live) / 2,
            (choice.stage - given.stage),
            2 * (choice.remat != given.remat),
            math.log2(given.micro / choice.micro) + (choice.micro != given.micro),
            4 * OFFLOADS.index(choice.offload),
        )
        return (sum(steps), *steps)

    return severity


def _is_further(choice: Choice, than: Choice) -> bool:
    """Returns whether a choice goes at least as far as another choice in every setting."""
    return (
        choice.stage >= than.stage
        and choice.keeps_no_more(than)
        and choice.micro <= than.micro
        and choice.live <= than.live
        and OFFLOADS.index(choice.offload) >= OFFLOADS.index(than.offload)
    )
