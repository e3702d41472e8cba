"""Reasons why a function cannot run on some rows at a time, in the words of its user."""

from __future__ import annotations

from zerojax.accumulation.equation_analysis import AFTER, BENDS, BRINGS, LASTS, LOOPS, TAKES
from zerojax.accumulation.kinds import Problem
from zerojax.accumulation.symbolic import UnevenError

TOGETHER = "brings rows together"
DEPENDS = "depends on the number of rows"
RUNS_OVER = "runs over the rows"
_DOES = {
    **dict.fromkeys((TAKES, BENDS, AFTER), "takes rows together with a result of all rows"),
    LOOPS: RUNS_OVER,
    LASTS: "brings rows together in its condition, inside while",
}


class Undivided(Exception):
    """A function cannot run on some rows at a time; the message says why."""

    @classmethod
    def at(cls, where: str, does: str) -> Undivided:
        """Returns the error for an equation, "primitive at file:line", and what it ``does``."""
        name, _, place = where.partition(" at ")
        return cls(f"its {name} {does}" + (f" ({place})" if place else ""))

    @classmethod
    def because(cls, problem: Problem, rows: int) -> Undivided:
        """Returns the error for a result with a problem, in a function of as many
        rows."""
        if problem.shape is not None:
            return cls(f"it creates an array of shape {problem.shape} of {rows} rows")
        if problem.why == BRINGS:
            return cls("it has a constant with an entry for each row")
        return cls.at(problem.where, _DOES.get(problem.why, TOGETHER))

    @classmethod
    def uneven(cls, error: UnevenError) -> Undivided:
        """Returns the error for two programs that cannot be matched."""
        where = str(error)
        named = " " not in where.partition(" at ")[0]  # like primitives
        return cls.at(where, DEPENDS) if named else cls(f"its program {DEPENDS} ({where})")
