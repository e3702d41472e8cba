"""Analyses of which values of a program depend on some of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from zerojax.graph.analysis import Analysis
from zerojax.xla.types import Atom, Equation, HasEquations


def _any(eqn: Equation, operands: Sequence[bool]) -> list[bool]:
    return [any(operands)] * len(eqn.outvars)


DEPENDS: Analysis[bool] = Analysis(False, operator.or_, _any)
"""Forward analysis of whether a value depends on the arguments. The results of a call or a loop are
distinguished."""


def dependent(jaxpr: HasEquations, arguments: Sequence[bool]) -> Mapping[Atom, bool]:
    """Returns by variable of an open jaxpr, and of the programs inside its equations, whether the
    value depends on one of ``arguments``."""
    # An analysis of its own: one that has met a program does not visit its variables again.
    found: dict[Atom, bool] = {}
    Analysis(False, operator.or_, _any, everywhere=found).forward(jaxpr, arguments)
    return found


EQUATION_DEPENDS: Analysis[bool] = Analysis(False, operator.or_, _any, enters=False)
"""Forward analysis of whether the equation that computes a value has an operand that depends on the
arguments, even if only another result of the equation needs that operand."""
