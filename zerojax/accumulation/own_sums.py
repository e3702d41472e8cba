"""Checks of a step in which each device sums gradients over its own rows until the update."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.lines import where
from zerojax.accumulation.split import Split
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE, LABELS
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation


def remedy(key: str) -> str:
    """Returns the last suggestion of an error message: to remove the config key."""
    return f"or take {key} out"


def parameters_of(
    flat: Flat, names: Sequence[str], chosen: Collection[int], key: str
) -> dict[Atom, int]:
    """Maps each variable from which a parameter's gradient is computed element by element to the
    position of the parameter.

    Args:
      flat: The step.
      names: Names of the parameters.
      chosen: Positions of the parameters to look at.
      key: The config key that enables the reducer, for the error.

    Raises:
      ValueError: Not every parameter's gradient reaches the optimizer once, in the step itself.
    """
    graph, reach = graph_of(flat), marks.gradients(flat)
    if len(reach) != len(names):
        raise ValueError(
            f"{key}: the step updates in a branch, in a loop or more than once, and errors are fed "
            f"back into one update: update once, in the step itself, {remedy(key)}."
        )
    found: dict[Atom, int] = {}
    for i in chosen:
        left = [reach[i]]
        while left:
            v = left.pop()
            if v in found:
                continue
            found[v] = i
            eqn = graph.producer(v)
            if eqn is not None and eqn.primitive.name in ELEMENTWISE | LABELS:
                same = [x for x in jaxprs.variables(eqn.invars) if x.aval.shape == v.aval.shape]
                left += same
    return found


def check_sums(
    split: Split,
    flat: Flat,
    analysis: Analysis,
    names: Sequence[str],
    parameters: dict[Atom, int],
    key: str,
) -> None:
    """Raises ValueError if a gradient is not a single sum over rows, which each device could
    compute separately and send with its error."""
    sums = [parameters.get(x.variable) for x in split.crossing if x.how == "sum"]
    reach = marks.gradients(flat)
    for i in sorted({*parameters.values()}):
        if sums.count(i) > 1 or (not sums.count(i) and analysis.kind(reach[i]).needs_all_rows):
            raise ValueError(
                f"{key}: the gradient of {names[i]} is no single sum over the rows of the batch in "
                "the parameter's own form, to which an error could be added: hand the optimizer "
                f"what jax.grad gives, {remedy(key)}."
            )


def obstacle(split: Split, analysis: Analysis, eqn: Equation | None) -> str | None:
    """Returns why devices cannot run a step separately; None if they can.

    Args:
      split: The step.
      analysis: The analysis of the step.
      eqn: The first equation that cannot run side by side; None if all can.
    """
    if eqn is not None:
        return f"{where(eqn)} cannot run for each device by itself"
    if analysis.drawn:
        return f"noise in the batch's shape ({analysis.drawn[0]}) would be the same on all devices"
    if analysis.owners:
        return f"each device would have statistics of its own rows ({analysis.owners[0]})"
    if split.carry or split.n_last:
        return "state that the batch changes would differ from device to device"
    return None
