"""The collectives that a traced program asks XLA for, from the ledger of their emission."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from zerojax.accumulation.lines import line
from zerojax.collectives import decisions
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.propagate import FORWARD
from zerojax.step.collectives_table import CollectiveRow, CollectivesTable
from zerojax.step.program import TracedProgram
from zerojax.trace.elementwise import ELEMENTWISE, LABELS
from zerojax.trace.operations import Operation, Program
from zerojax.xla import jaxprs

_MOVES = (
    LABELS
    | FORWARD.keys()
    | {
        "concatenate", "convert_element_type", "dynamic_slice", "dynamic_update_slice",
        "optimization_barrier", "pad", "slice", "device_put", "copy_p",
    }
)  # fmt: skip
_SAME = _MOVES | ELEMENTWISE | {"reduce", "reduce_sum"}


def collectives_of(name: str, traced: TracedProgram, ledger: Ledger) -> CollectivesTable:
    """The collectives of a step.

    Args:
      name: Of the step.
      traced: Its program, traced while ``ledger`` was asked.
      ledger: Has the decisions.
    """
    program = Program(traced.jaxpr)
    finder = _Finder(program, traced)
    rows: list[CollectiveRow] = []
    seen: set[int] = set()
    for at in sorted(program.live()):
        op = program.operations[at]
        found = ledger.of(op.names)
        if found and id(found) not in seen:
            seen.add(id(found))
            rows += [finder.row(op, decision) for decision in found]
    return CollectivesTable(name, tuple(rows))


class _Finder:
    """Finds the arrays and the lines of collectives.

    Args:
      program: The operations of a step.
      traced: The same, with the paths of its arguments and results.
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
        """The row of a decision that an operation follows."""
        gathers = decision.kind == decisions.GATHER
        paths = self._origins(op) if gathers else self._destinations(op)
        place = self._line(op, forward=gathers)
        return CollectiveRow(
            kind=decision.kind,
            array=", ".join(paths),
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
        """The leaves of the state that an array is moved or computed from element by element."""
        start = [v for v in op.operands if v is not None]
        found = self._program.reached(start, _is_same, forward=False)
        return [path for v, path in self._arguments.items() if v in found]

    def _destinations(self, op: Operation) -> list[str]:
        """The leaf of the state that follows from a gradient; parameters come first."""
        found = self._program.reached(op.results, _is_same, forward=True)
        return [path for v, path in self._results.items() if v in found][:1]

    def _line(self, op: Operation, *, forward: bool) -> str | None:
        """The line that uses an array first, or that a gradient comes from; else its own."""
        for other in self._nearest(op, forward=forward):
            if place := _line_of(other):
                return place
        return _line_of(op)

    def _nearest(self, op: Operation, *, forward: bool) -> Iterator[Operation]:
        """The operations behind moves of an array, or before element-wise work; nearest first."""
        program, through = self._program, _MOVES if forward else _SAME
        left = deque(op.results if forward else [v for v in op.operands if v is not None])
        found: set[int] = set()
        while left:
            v = left.popleft()
            if v in found:
                continue
            found.add(v)
            left += program.targets[v] if forward else program.sources[v]
            maker = program.makers.get(v)
            at = program.users[v] if forward else [] if maker is None else [maker]
            for other in (program.operations[i] for i in at):
                if other.eqn.primitive.name not in through:
                    yield other
                else:
                    left += _next(program, other, v, forward=forward)


def _next(program: Program, op: Operation, v: int, *, forward: bool) -> Sequence[int]:
    at = program.makers[op.results[0]]
    if not forward:
        return program.needed(at, v)
    return [r for r in op.results if v in program.needed(at, r)]


def _is_same(op: Operation) -> bool:
    return op.eqn.primitive.name in _SAME


def _line_of(op: Operation) -> str | None:
    return line(jaxprs.source(op.eqn).traceback, models=True)
