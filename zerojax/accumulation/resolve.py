"""Which numbers of all rows are made first, and which each micro-batch makes for itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import Choices
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.kinds import RowKind


def analyse(
    whole: Flat, micro: Flat, given: Sequence[RowKind], rest: Sequence[int]
) -> tuple[Analysis, Choices]:
    """The analysis of a step with its conflicts resolved, as far as they can be.

    A number of all rows that goes back into the rows

    - and follows from the batch alone (the sum of a mask) is made before the micro-batches;
    - and goes into the carried state too (batch statistics) is each micro-batch's own, and so is
      what differentiation makes of the equations that compute and read it: their backward pass has
      their place in the program. The sums of any other backward pass, a ``custom_vjp``'s for one,
      are those of all rows.

    Args:
      whole, micro: The step traced on the whole batch and on a micro-batch.
      given: The kinds of its arguments.
      rest: Positions among the results of the state beside parameters and optimizer.

    Raises:
      UnevenError: The two programs differ in more than shapes.
    """
    choices = Choices()
    owned = set[Any]()  # places of equations that compute or read batch statistics
    while True:
        analysis = Analysis(whole, micro, given, choices, hopeful=True)
        statistics = set()
        for i in rest:
            if (node := analysis.kind(whole.outvars[i]).node) is not None:
                # What gradients change is no statistic of the batch.
                statistics |= {r for r in node.roots() if not analysis.backward.get(r)}
        # What goes into the rows of a forward pass is no backward pass's own.
        forward = set()
        for conflict in analysis.conflicts:
            if not conflict.backward and conflict.kind.node is not None:
                roots = conflict.kind.node.roots()
                forward |= roots
                if roots and roots <= statistics:
                    owned |= {analysis.place(path) for path in (conflict.path, *roots)}
        owned -= {None}
        before = len(choices.first), len(choices.own)
        for conflict in analysis.conflicts:
            kind = conflict.kind
            if not kind.learned and kind.home is not None:
                choices.first.add(kind.home)
                continue
            roots = kind.node.roots() if kind.node is not None else set()
            backward = {r for r in roots if analysis.backward.get(r)} - forward
            own = {r for r in backward if _differentiates(analysis.place(r), owned)}
            if roots <= statistics | own:
                choices.own |= roots
        if not analysis.conflicts:
            return analysis, choices
        if before == (len(choices.first), len(choices.own)):
            return Analysis(whole, micro, given, choices, hopeful=False), choices


def _differentiates(place: tuple[Any, ...] | None, owned: Collection[Any]) -> bool:
    """Whether an equation has the place of one of those ``owned``. The forward pass of a checkpoint
    stands in the step without the checkpoint's call."""
    return place is not None and any(place[i:] in owned for i in range(len(place)))
