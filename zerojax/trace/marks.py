"""Marks on values of the user's step, by which zerojax finds the values in the traced step.

A mark is a named identity, like that of ``jax.ad_checkpoint.checkpoint_name``, so that it costs
nothing, means nothing outside a decorated step, and survives every transformation.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.graph import search
from zerojax.graph.analysis import Analysis
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import COMPARISONS, SUMS
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, HasEquations, Jaxpr, PyTree

GRADIENT = "zerojax gradient"
"""A gradient that reaches the optimizer."""
UNUSED = "zerojax unused gradient"
"""A gradient that reaches the optimizer but is not used by an update after the step."""
SEED = "zerojax loss scale"
"""The factor on the loss before the backward pass: 1, to be replaced by the loss scale."""
LOSS = "zerojax loss"
"""The loss that is multiplied by the factor."""
SHARD = "zerojax shard"
"""An array of the state of which each device needs only its shard."""
# The loss scale before the loss, whose name is a prefix of its name.
_NAMES = GRADIENT, UNUSED, SEED, LOSS, SHARD


def mark(tree: PyTree, name: str) -> PyTree:
    """Marks the arrays of a tree, each also with its path in the tree."""
    # Under jax_remat3 checkpoint_name binds a primitive that does not outlast the trace.
    return jax.tree_util.tree_map_with_path(
        lambda path, x: prims.name_p.bind(x, name=f"{name} {jax.tree_util.keystr(path)}"), tree
    )


def name_of(eqn: Equation) -> str:
    """Returns the name of a mark, or of another named value; empty for other equations."""
    if eqn.primitive is not prims.name_p:
        return ""
    name = str(jaxprs.param(eqn, "name"))
    return next((known for known in _NAMES if name.startswith(known)), name)


def is_mark(eqn: Equation, name: str) -> bool:
    """Returns whether an equation is a mark of this name."""
    return eqn.primitive is prims.name_p and name_of(eqn) == name


def path_of(eqn: Equation) -> str:
    """Returns the path of the array that an equation marks, in the tree that was marked."""
    return str(jaxprs.param(eqn, "name")).removeprefix(name_of(eqn)).strip()


def gradients(jaxpr: HasEquations) -> list[Atom]:
    """Returns the variables of a program that reach the optimizer, in order, without those inside
    equations."""
    return graph_of(jaxpr).results(lambda eqn: is_mark(eqn, GRADIENT))


def holds(eqn: Equation, name: str) -> bool:
    """Returns whether an equation is a mark of this name, or contains one at any depth."""
    return search.contains(eqn, is_mark, name)


def reach_optimizer(jaxpr: Jaxpr) -> bool:
    """Returns whether gradients reach the state's optimizer, at any depth of an open jaxpr."""
    return search.holds(jaxpr, is_mark, search.everything, GRADIENT)


def count(jaxpr: Jaxpr, name: str) -> tuple[int, int]:
    """Counts the marks of this name outside loops, and the loops with marks.

    Of several branches the one with the most marks counts. The recomputation of a rematerialised
    block is left out.
    """
    times = looped = 0
    for eqn in jaxpr.eqns:
        if is_mark(eqn, name):
            times += 1
        elif inside := jaxprs.bodies(eqn):
            # A rematerialised block runs its equations, and so its marks, a second time.
            if not jaxprs.runs_backward(eqn):
                once, often = zip(*(count(body, name) for body in inside), strict=True)
                times, looped = times + max(once), looped + max(often)
        else:
            looped += holds(eqn, name)
    return times, looped


class MarkOrigins(enum.IntFlag):
    """The origins of a value."""

    INPUT = enum.auto()
    """An argument of the step, not only constants."""
    MARK = enum.auto()
    """The mark."""
    MIXED = enum.auto()
    """The mark and something without it, so that the value is not proportional to the mark."""


def origins_of(jaxpr: Jaxpr, name: str) -> dict[str, list[MarkOrigins]]:
    """Returns the origins of each gradient that reaches the optimizer, and of each loss, with
    respect to marks of this name.

    Zeros are left out. Loops are not entered, and a program that several equations call counts
    once.
    """
    origins: dict[str, list[MarkOrigins]] = {GRADIENT: [], LOSS: []}

    def result_origins(eqn: Equation, ins: Sequence[MarkOrigins]) -> list[MarkOrigins]:
        mark = MarkOrigins.MARK if holds(eqn, name) else MarkOrigins(0)
        mixed = MarkOrigins.MIXED if _mixes(eqn, ins) else MarkOrigins(0)
        return [functools.reduce(operator.or_, ins, mark | mixed)] * len(eqn.outvars)

    analysis = Analysis(MarkOrigins(0), operator.or_, result_origins, control=False)
    analysis.rule("scan", "while", "shard_map")(result_origins)

    @analysis.rule("name")
    def _(eqn: Equation, ins: Sequence[MarkOrigins]) -> list[MarkOrigins]:
        # Parameters that a loss does not use have zeros for gradients.
        if (mark := name_of(eqn)) in origins and ins[0]:
            origins[mark].append(ins[0])
        return result_origins(eqn, ins)

    analysis.forward(jaxpr, [MarkOrigins.INPUT] * len(jaxpr.invars))
    return origins


def _mixes(eqn: Equation, ins: Sequence[MarkOrigins]) -> bool:
    """Returns whether an equation adds or compares values with and without the mark."""
    marked = [MarkOrigins.MARK in origin for origin in ins]
    if not any(marked) or all(marked):
        return False
    if eqn.primitive.name in COMPARISONS:
        return True
    # Zeros do no harm, and a constant that is not a literal is zeros as a rule.
    return eqn.primitive.name in SUMS and any(
        MarkOrigins.INPUT in origin or (isinstance(v, core.Literal) and np.any(v.val))
        for v, origin, is_marked in zip(eqn.invars, ins, marked, strict=True)
        if not is_marked
    )
