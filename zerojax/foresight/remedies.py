"""A search for settings with which a step fits; each candidate is compiled."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from zerojax.foresight.choice import OFFLOADS, TRIED, Choice, Remat
from zerojax.foresight.trials import Trial, Trials

COMPILES = 8
PRODUCTS = "dots_no_batch"
"""The policy of blocks that keep results of products with weights."""


def remedies(trials: Trials, wanted: int = 3, *, policies: Sequence[str] = ()) -> list[Trial]:
    """Returns choices for the same rows that fit, in ascending order of predicted time.

    Milder choices are tried first: no parameters that stay gathered, then higher stages (the next
    one first), remat, smaller micro-batches, offload. A choice is skipped if it goes at least as
    far in every setting as a choice that fits, or if earlier forecasts show that it cannot fit.

    Args:
      trials: The trials of the step on the devices.
      wanted: The number of remedies after which the search ends.
      policies: Names for ``zerojax.remat_policy`` to try between blocks that keep everything and
        blocks that keep only their input; empty if the model takes none.
    """
    trials.limit(COMPILES)
    given = trials.given
    try:
        for choice in milder_first(given, bool(trials.plan(given).live), policies):
            if len(trials.fitted) == wanted:
                break
            steps = _steps(given, choice)
            if not any(all(map(operator.ge, steps, _steps(given, x))) for x in trials.fitted):
                trials.fitting(choice)
    except TimeoutError:
        pass
    return sorted(trials.fitted.values(), key=lambda remedy: remedy.seconds)


def milder_first(
    given: Choice, stays: bool = True, policies: Sequence[str] = ()
) -> Iterator[Choice]:
    """Returns the choices that go further than ``given`` in some setting and less far in none,
    mildest first.

    Args:
      given: The choice that does not fit.
      stays: Whether some parameter stays gathered under ``given``.
      policies: As for :func:`remedies`.
    """
    stages = range(given.stage, 4)
    between = policies if given.remat is False else ()
    leanest = [] if given.remat in (None, True) else [True]
    remats: Sequence[Remat] = [given.remat, *between, *leanest]
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
    steps = {each: _steps(given, each) for each in choices if each != given and each.possible}
    return iter(sorted(steps, key=lambda each: (sum(steps[each]), *steps[each])))


def _steps(given: Choice, choice: Choice) -> tuple[float, ...]:
    """Returns how far a choice goes beyond ``given``, by setting."""
    return (
        (choice.live < given.live) / 2,
        (choice.stage - given.stage),
        (1 if isinstance(choice.remat, str) else 2) * (choice.remat != given.remat),
        math.log2(given.micro / choice.micro) + (choice.micro != given.micro),
        4 * OFFLOADS.index(choice.offload),
    )
