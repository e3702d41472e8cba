"""Decisions about values reduced over all rows: computed first, or by each micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import Choices
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.kinds import RowKind
from zerojax.accumulation.symbolic import Symbolic
from zerojax.graph.def_use import graph_of
from zerojax.xla.types import Atom


def analyse(
    symbolic: Symbolic, given: Sequence[RowKind], rows: int, rest: Sequence[int]
) -> tuple[Analysis, Choices]:
    """Analyses a step, and resolves its conflicts as far as possible.

    A value reduced over all rows that is combined with rows again

    - is computed before the micro-batches if it depends only on the batch (the sum of a mask);
    - is each micro-batch's own if it also enters the carried state (batch statistics). The same
      holds for the derivatives of the equations that compute and read it: their backward pass has
      the same place in the program. The sums of any other backward pass, such as a
      ``custom_vjp``'s, are over all rows.

    Args:
      symbolic: The step.
      given: The kinds of its arguments.
      rows: Rows of a micro-batch.
      rest: Positions, among the results, of state other than parameters and optimizer state.
    """
    choices = Choices()
    flat = symbolic.flat
    owned = set[object]()  # places of equations that compute or read batch statistics
    while True:
        analysis = Analysis(symbolic, given, rows, choices, hopeful=True)
        statistics = set[Atom]()
        for i in rest:
            if (node := analysis.kind(flat.outvars[i]).node) is not None:
                # Reductions of the backward pass are gradients, not batch statistics.
                statistics |= {r for r in node.roots() if not analysis.is_backward(r)}
        statistics |= _upstream(flat, analysis, statistics)
        # A value that the forward pass combines with rows does not belong to a backward pass.
        forward = set()
        for conflict in analysis.conflicts:
            if not conflict.backward and conflict.kind.node is not None:
                roots = conflict.kind.node.roots()
                forward |= roots
                if roots and roots <= statistics:
                    owned.add(analysis.bound(conflict.place))
                    owned |= {analysis.bound_reduction(r) for r in roots}
        owned -= {None}
        before = len(choices.first), len(choices.own)
        for conflict in analysis.conflicts:
            kind = conflict.kind
            if not kind.learned and kind.home is not None:
                choices.first.add(kind.home)
                continue
            roots = kind.node.roots() if kind.node is not None else set()
            backward = {r for r in roots if analysis.is_backward(r)} - forward
            own = {r for r in backward if _differentiates(analysis.bound_reduction(r), owned)}
            if roots <= statistics | own:
                choices.own |= roots
        if not analysis.conflicts:
            return analysis, choices
        if before == (len(choices.first), len(choices.own)):
            return Analysis(symbolic, given, rows, choices), choices


def _upstream(flat: Flat, analysis: Analysis, statistics: set[Atom]) -> set[Atom]:
    """Returns the reductions on which statistics depend through rows, such as the mean of a
    variance."""
    graph, found = graph_of(flat), set[Atom]()
    places = {graph.place(analysis.reductions[r].place[0]) for r in statistics}
    for conflict in analysis.conflicts:
        start, roots = conflict.kind.home, conflict.kind.node and conflict.kind.node.roots()
        if conflict.backward or start is None or not roots or roots <= statistics:
            continue
        reached, left = set[int](), [start]
        while left:
            for use in graph.users(left.pop()):
                if (place := graph.place(use.equation)) not in reached:
                    reached.add(place)
                    left += use.equation.outvars
        if not places.isdisjoint(reached):
            found |= roots
    return found


def _differentiates(place: tuple[object, ...] | None, owned: Collection[object]) -> bool:
    """Returns whether an equation's place, or a suffix of it, is one of ``owned``."""
    # Differentiation inlines the forward pass of a checkpoint, so that its call is missing there.
    return place is not None and any(place[i:] in owned for i in range(len(place)))
