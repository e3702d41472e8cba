"""Decisions about values reduced over all rows: computed first, or by each micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import Choices, Path
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.kinds import RowKind
from zerojax.graph.def_use import graph_of


def analyse(
    global_flat: Flat, micro_flat: Flat, given: Sequence[RowKind], rest: Sequence[int]
) -> tuple[Analysis, Choices]:
    """Analyses a step, and resolves its conflicts as far as possible.

    A value reduced over all rows that is combined with rows again

    - is computed before the micro-batches if it depends only on the batch (the sum of a mask);
    - is each micro-batch's own if it also enters the carried state (batch statistics). The same
      holds for the derivatives of the equations that compute and read it: their backward pass has
      the same place in the program. The sums of any other backward pass, such as a
      ``custom_vjp``'s, are over all rows.

    Args:
      global_flat, micro_flat: The step traced on the global batch and on a micro-batch.
      given: The kinds of its arguments.
      rest: Positions, among the results, of state other than parameters and optimizer state.

    Raises:
      UnevenError: The two programs differ in more than shapes.
    """
    choices = Choices()
    owned = set[object]()  # places of equations that compute or read batch statistics
    while True:
        analysis = Analysis(global_flat, micro_flat, given, choices, hopeful=True)
        statistics = set[Path]()
        for i in rest:
            if (node := analysis.kind(global_flat.outvars[i]).node) is not None:
                # Reductions of the backward pass are gradients, not batch statistics.
                statistics |= {r for r in node.roots() if not analysis.backward.get(r)}
        statistics |= _upstream(global_flat, analysis, statistics)
        # A value that the forward pass combines with rows does not belong to a backward pass.
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
            return Analysis(global_flat, micro_flat, given, choices, hopeful=False), choices


def _upstream(flat: Flat, analysis: Analysis, statistics: set[Path]) -> set[Path]:
    """Returns the reductions on which statistics depend through rows, such as the mean of a
    variance."""
    graph, found = graph_of(flat), set[Path]()
    places = {path[0] for path in statistics}
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
    """Returns whether an equation's place, or a suffix of it, is one of ``owned``. Suffixes count
    because the forward pass of a checkpoint is in the step without the checkpoint's call."""
    return place is not None and any(place[i:] in owned for i in range(len(place)))
