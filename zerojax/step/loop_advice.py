"""Advice on loops of a step: updates along the batch's first dimension, and gradients that the step
itself accumulates over micro-batches."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax.numpy as jnp

from zerojax.accumulation.lines import line
from zerojax.collectives.reuse import ORIGINS, Origin
from zerojax.distributed import log
from zerojax.graph.analysis import Analysis
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE, LABELS
from zerojax.graph.regions import regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr

STACKED = (
    "%s: the scan at %s updates the state once for each entry of the batch's leading dimension, "
    "which zerojax shards as rows, so that every device computes each update on all rows. If the "
    "rows are the next dimension, [steps, rows, ...], write zero(step, batch_axis=1)."
)
MICRO_BATCHES = (
    "%s: the loop at %s adds up gradients over parts of the batch, and reduces each of them: "
    "compute the gradient of the global batch in its place, and set gradient_accumulation_steps to "
    "the number of parts."
)


class _Origin(enum.Enum):
    STATE = enum.auto()
    ROWS = enum.auto()  # the first dimension is that of the batch


Fact = frozenset[_Origin | tuple[str, str]]
"""The facts about a value: its origin in state or batch, element by element, and the loops from
which it is computed, as (advice, line)."""


def _loops(eqn: Equation, operands: Sequence[Fact]) -> list[Fact]:
    found = frozenset(x for fact in operands for x in fact if not isinstance(x, _Origin))
    return [found] * len(eqn.outvars)


FACTS: Analysis[Fact] = Analysis(frozenset(), frozenset.union, _loops, control=False)


@FACTS.rule(*ELEMENTWISE | LABELS)
def _(eqn: Equation, operands: Sequence[Fact]) -> list[Fact]:
    shape = eqn.outvars[0].aval.shape
    alike = [
        fact for v, fact in zip(eqn.invars, operands, strict=True) if fact and v.aval.shape == shape
    ]
    return [frozenset().union(*alike, *_loops(eqn, operands))]


@FACTS.rule("scan", "while")
def _(eqn: Equation, operands: Sequence[Fact]) -> list[Fact]:
    *_, body = regions(eqn)
    given = [
        fact - {_Origin.ROWS, _Origin.STATE} if body.is_entry(i) else fact
        for i, fact in enumerate(operands)
    ]
    results = FACTS.through(eqn, given)
    by_row = any(_Origin.ROWS in fact for fact in operands) and given != list(operands)
    is_state = [_Origin.STATE in operands[body.operands[at]] for _, at in body.carries]
    pairs = [(body.jaxpr.outvars[out], body.jaxpr.invars[at]) for out, at in body.carries]
    carries = list(zip(pairs, is_state, strict=True))
    advice = []
    if by_row and any(new is not old for (new, old), state in carries if state):
        advice.append(STACKED)
    if any(_adds_gradient(body.jaxpr, *pair) for pair, state in carries if not state):
        advice.append(MICRO_BATCHES)
    place = line(jaxprs.source(eqn).traceback) or "a line that is not known" if advice else ""
    found = frozenset((text, place) for text in advice)
    return [
        found | (fact - {_Origin.ROWS, _Origin.STATE} if body.is_stacked(i) else fact)
        for i, fact in enumerate(results)
    ]


def _adds_gradient(jaxpr: Jaxpr, result: Atom, start: Atom) -> bool:
    """Returns whether a result of a program is one of its arguments plus a gradient."""
    graph = graph_of(jaxpr)
    eqn = graph.producer(result)
    if eqn is None or start not in eqn.invars or not start.aval.ndim:
        return False
    if eqn.primitive in jaxprs.CALLS:
        (inside,) = regions(eqn)
        result = inside.jaxpr.outvars[eqn.outvars.index(result)]
        return _adds_gradient(inside.jaxpr, result, inside.argument(eqn.invars.index(start)))
    if eqn.primitive.name != "add":
        return False
    origins = ORIGINS.forward(jaxpr, [Origin(0)] * len(jaxpr.invars)).of
    return any(Origin.SUM in origins.get(v, Origin(0)) for v in jaxprs.variables(eqn.invars))


def advise(name: str, jaxpr: Jaxpr, rows: int, *, by_row: bool) -> None:
    """Logs advice on the loops of a step.

    Args:
      name: The step's name.
      jaxpr: The traced step, open; the arrays of its batch are its last arguments.
      rows: The number of these arrays.
      by_row: Whether the first dimension of these arrays is sharded as rows.
    """
    n = len(jaxpr.invars) - rows
    state, batch = frozenset({_Origin.STATE}), frozenset({_Origin.ROWS} if by_row else ())
    given = [
        state if i < n and _is_large(v) else batch if i >= n else frozenset()
        for i, v in enumerate(jaxpr.invars)
    ]
    ends = FACTS.forward(jaxpr, given).ends
    found: Fact = frozenset().union(*ends)
    for text, place in sorted(x for x in found if not isinstance(x, _Origin)):
        log.warning(text, name, place)


def _is_large(v: Atom) -> bool:
    return v.aval.ndim > 0 and jnp.issubdtype(v.aval.dtype, jnp.floating)
