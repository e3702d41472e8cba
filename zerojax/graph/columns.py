"""Columns of products with weights, and whether a program needs them complete.

    logits[b, t, v] = x[b, t, d] * w[d, v]                  v is a dimension of the weight
    loss[b, t] = logsumexp(logits[b, t, :]) - logits[b, t, label]
    dx[b, t, d] = dlogits[b, t, v] * w[d, v]

If each use of the logits reduces ``v``, picks one entry along it, or contracts it with the same
weight, devices that compute some columns each need no columns of the others: they combine the sums
and the maxima, as in Megatron's vocabulary-parallel cross-entropy. Other uses need all columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from zerojax.graph.analysis import Analysis
from zerojax.graph.contractions import Contraction
from zerojax.graph.dimensions import names_of
from zerojax.graph.regions import regions
from zerojax.xla.types import Atom, Equation, HasEquations

Dims = frozenset[int]
NONE: Dims = frozenset()


def needed_dims(
    jaxpr: HasEquations,
    same_weight: Callable[[Atom, int, Atom, int], bool],
    has_rows: Callable[[Atom], bool],
) -> Mapping[Atom, Dims]:
    """Returns, by variable of an open jaxpr and of the programs inside its equations, the
    dimensions along which some use needs all entries on one device.

    Args:
      jaxpr: The program.
      same_weight: Returns for two values, each with one of its dimensions, whether these are one
        dimension of the same weight.
      has_rows: Returns whether a value has rows of the batch. One without is a gradient or a state,
        of which each device may have a shard.
    """

    def needed(eqn: Equation, outs: Sequence[Dims]) -> list[Dims]:
        """A name that a result needs complete, or that no rule follows, is needed."""
        names = names_of(eqn)
        if names is None:
            return [*map(_every, eqn.invars)]
        n, product = len(eqn.invars), Contraction.of(eqn)
        asked = {of[d] for of, dims in zip(names[n:], outs, strict=True) for d in dims}
        if product is not None:
            # Each device may have a shard of a gradient, or of a state.
            asked = asked if has_rows(eqn.outvars[0]) else set()
            for i, j in zip(*product.contracted, strict=True):
                if not same_weight(eqn.invars[0], i, eqn.invars[1], j):
                    asked.add(names[0][i])
        return [
            frozenset(d for d, name in enumerate(of) if name is None or name in asked)
            for of in names[:n]
        ]

    def scan(eqn: Equation, outs: Sequence[Dims]) -> list[Dims]:
        """An iteration takes entries of stacks, and returns entries."""
        (body,) = regions(eqn)
        outs = [_shifted(x, -1) if body.is_stacked(i) else x for i, x in enumerate(outs)]
        ins = analysis.back_through(eqn, outs)
        return [_shifted(x, 1) | {0} if body.is_entry(i) else x for i, x in enumerate(ins)]

    found: dict[Atom, Dims] = {}
    analysis: Analysis[Dims] = Analysis(NONE, operator.or_, needed, everywhere=found)
    analysis.rule("scan")(scan)
    analysis.backward(jaxpr, [_every(v) if has_rows(v) else NONE for v in jaxpr.outvars])
    return found


def _shifted(dims: Dims, by: int) -> Dims:
    return frozenset(d + by for d in dims if d + by >= 0)


def _every(v: Atom) -> Dims:
    return frozenset(range(getattr(v.aval, "ndim", 0)))
