"""The array of the state that a collective sends, and the user's line that causes it."""

from __future__ import annotations

from collections.abc import Iterator

from zerojax.accumulation.lines import line
from zerojax.collectives import decisions
from zerojax.graph.operations import Operation, Program
from zerojax.graph.primitives import GENERAL_SUMS, MOVES_OR_ROUNDS
from zerojax.step.collectives_table import CollectiveRow
from zerojax.step.program import TracedProgram
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


class Origins:
    """The arrays and the source lines of collectives.

    Args:
      program: The operations of a step.
      traced: The traced step, with the paths of its arguments and results.
    """

    def __init__(self, program: Program, traced: TracedProgram) -> None:
        self._program = program
        self._arguments = dict(zip(program.arguments, traced.arguments, strict=False))
        self._results = {
            v: path
            for v, path in zip(program.results, traced.results, strict=False)
            if v is not None
        }

    def row(self, op: Operation, decision: decisions.Decision) -> CollectiveRow:
        """Returns the table row of a decision that an operation implements."""
        is_norm = decision.where == decisions.UPDATE and not decision.shape
        if is_norm or decision.where == decisions.STAGES:
            paths, place = list[str](), _line_of(op.eqn)
        else:
            paths = self._destinations(op) if decision.of_gradient else self._origins(op)
            place = self._line(op, decision)
        return CollectiveRow(
            kind=decision.kind,
            arrays=tuple(paths),
            shape=decision.shape,
            dtype=decision.dtype,
            bytes=decision.bytes,
            times=op.times,
            exact=op.exact,
            where=decision.where,
            reason=decision.reason,
            line=place or "",
        )

    def _origins(self, op: Operation) -> list[str]:
        """Returns the leaves of the state from which an array is moved, or computed elementwise."""
        start = [v for v in op.operands if v is not None]
        found = self._program.reached(start, _is_elementwise, forward=False)
        return [path for v, path in self._arguments.items() if v in found]

    def _destinations(self, op: Operation) -> list[str]:
        """Returns the leaf of the state that a gradient goes into; parameters come first."""
        found = self._program.reached(op.results, _is_elementwise, forward=True)
        return [path for v, path in self._results.items() if v in found][:1]

    def _line(self, op: Operation, decision: decisions.Decision) -> str | None:
        """Returns the line that uses an array first, or that a gradient comes from."""
        own_line, forward = _line_of(op.eqn), not decision.of_gradient
        calls = filter(None, (_line_of(call) for call in reversed(decision.calls)))
        if forward and op.name not in MOVES_OR_ROUNDS:
            return own_line or next(calls, None)
        if decision.where in (decisions.PRODUCED, decisions.LOOP) and not forward:
            return own_line or next(calls, None)
        lines = (_line_of(other.eqn) for other in self._nearest(op, own_line, forward=forward))
        found = (place for place in lines if place and (forward or place != own_line))
        return next(found, None) or next(calls, own_line)

    def _nearest(self, op: Operation, own: str | None, *, forward: bool) -> Iterator[Operation]:
        """Yields the operations after moves of an array, or before elementwise operations and the
        sums that come from the line ``own``, nearest first."""

        def passes(other: Operation) -> bool:
            name = other.name
            if forward:
                return name in MOVES_OR_ROUNDS
            return other.by_element or (name in GENERAL_SUMS and _line_of(other.eqn) == own)

        start = op.results if forward else [v for v in op.operands if v is not None]
        for _, ends in self._program.search(start, passes, forward=forward):
            yield from ends


def _is_elementwise(op: Operation) -> bool:
    return op.by_element


def _line_of(eqn: Equation) -> str | None:
    return line(jaxprs.source(eqn).traceback, models=True)
