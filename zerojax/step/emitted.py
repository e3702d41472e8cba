"""The collectives that a traced program asks XLA for, from the ledger of their emission."""

from __future__ import annotations

from collections.abc import Sequence

from zerojax.collectives import decisions
from zerojax.collectives.decisions import Decision
from zerojax.collectives.ledger import Ledger
from zerojax.optim.norm import NORM
from zerojax.step.collective_origins import Origins
from zerojax.step.collectives_table import CollectiveRow, CollectivesTable
from zerojax.step.program import TracedProgram
from zerojax.trace.operations import SAME, Operation, Program

_REDUCTIONS = decisions.SCATTER, decisions.REDUCE


def collectives_of(name: str, traced: TracedProgram, ledger: Ledger) -> CollectivesTable:
    """The collectives of a step.

    Args:
      name: Of the step.
      traced: Its program, traced while ``ledger`` was asked.
      ledger: Has the decisions.
    """
    program = Program(traced.jaxpr)
    origins, emitted = Origins(program, traced), Emitted(program, ledger)
    batch = program.arguments[len(traced.arguments) :]
    rows: list[CollectiveRow] = []
    for op, found in emitted.collectives(batch):
        rows += [origins.row(op, decision) for decision in found]
    if any(row.kind == decisions.SCATTER for row in rows):
        norm = ledger.of_number("norm of the gradients, of which each device has its shards")
        rows += [origins.row(op, norm) for op in emitted.norms()]
    return CollectivesTable(name, tuple(rows))


class Emitted:
    """The operations of a program that follow decisions.

    Args:
      program: The operations.
      ledger: Has the decisions.
    """

    def __init__(self, program: Program, ledger: Ledger) -> None:
        self._program, self._alive = program, sorted(program.live())
        self._followed: dict[int, tuple[Decision, ...]] = {}
        self._rows: set[tuple[int, int]] = set()
        seen: set[int] = set()
        for at in self._alive:
            found = ledger.of(program.operations[at].names)
            if found and id(found) not in seen:
                seen.add(id(found))
                self._followed[at] = found

    def collectives(self, batch: Sequence[int]) -> list[tuple[Operation, tuple[Decision, ...]]]:
        """The operations that XLA sends something for, and what they follow, in order.

        Args:
          batch: The values of which each device has its own rows.
        """
        merged, program = self._merged(), self._program
        by_rows = program.reached(batch, lambda op: True, forward=True)
        return [
            (program.operations[at], self._without_known_rows(at, found))
            for at, found in self._followed.items()
            if at not in merged
            and (found[0].kind not in _REDUCTIONS or self._is_partial(at, by_rows))
        ]

    def _without_known_rows(self, at: int, found: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """What an operation on a table follows; without its gather of the row numbers, where the
        same numbers are gathered before."""
        op = self._program.operations[at]
        if op.eqn.primitive.name not in ("gather", "scatter-add") or op.operands[1] is None:
            return found
        known = (op.operands[1], op.times) in self._rows
        self._rows.add((op.operands[1], op.times))
        return found[1:] if known else found

    def norms(self) -> list[Operation]:
        """The operations that return the norm of the gradients."""
        found = (self._program.operations[at] for at in self._alive)
        return [op for op in found if op.eqn.primitive.name == "sqrt" and NORM in op.names]

    def _is_partial(self, at: int, by_rows: set[int]) -> bool:
        """Whether each device has a part of the sum that an operation takes. Otherwise each has all
        of it: what is moved, or computed element by element, from parameters, constants and
        gradients that are reduced already."""
        left = [v for v in self._program.operations[at].operands if v is not None]
        found: set[int] = set()
        while left:
            v = left.pop()
            if v in found:
                continue
            found.add(v)
            left += self._program.sources[v]
            maker = self._program.makers.get(v)
            if maker is None:
                continue
            if followed := self._followed.get(maker):
                if followed[-1].partly:
                    return True
                continue
            if self._program.operations[maker].eqn.primitive.name in SAME:
                left += self._program.needed(maker, v)
            elif v in by_rows:
                return True
        return False

    def _merged(self) -> set[int]:
        """Positions of the reductions whose result is added to that of a like reduction, and to
        nothing else: XLA adds up first then, and reduces once."""
        users, reduced = self._program.users, dict[int, tuple[int, tuple[Decision, ...]]]()
        merged: set[int] = set()
        for at in self._alive:
            op, found = self._program.operations[at], self._followed.get(at)
            if found and found[0].kind in _REDUCTIONS:
                reduced.update(dict.fromkeys(op.results, (at, found)))
            terms = [reduced[v] for v in op.operands if v in reduced and len(users[v]) == 1]
            if len(terms) != len(op.operands):
                continue
            match op.eqn.primitive.name, terms:
                case (("add" | "add_any"), [(one, sent), (_, other) as last]) if sent == other:
                    merged.add(one)
                    reduced[op.results[0]] = last
                case "transpose", [term]:
                    reduced[op.results[0]] = term
        return merged
