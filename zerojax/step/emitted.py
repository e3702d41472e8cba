"""The collectives that a traced program requests from XLA, found through the ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from zerojax.collectives import decisions, target_specs
from zerojax.collectives.decisions import Decision
from zerojax.collectives.ledger import Ledger
from zerojax.devices.mesh import STAGE
from zerojax.graph.operations import Operation, Program
from zerojax.graph.primitives import LOOKUPS
from zerojax.optim.norm import NORM
from zerojax.plan.layout import Spec
from zerojax.step.collective_origins import Origins
from zerojax.step.collectives_table import CollectivesTable
from zerojax.step.program import TracedProgram
from zerojax.trace import marks
from zerojax.xla import jaxprs

_REDUCTIONS = decisions.SCATTER, decisions.REDUCE

Decisions = tuple[Decision, ...]


def collectives_of(name: str, traced: TracedProgram, ledger: Ledger) -> CollectivesTable:
    """Returns the collectives of a step.

    Args:
      name: The step's name.
      traced: The step's program, traced while ``ledger`` recorded.
      ledger: The recorded decisions.
    """
    program = Program(traced.jaxpr)
    origins = Origins(program, traced)
    emitted = EmittedOperations(program, ledger, program.arguments[len(traced.arguments) :])
    found = [*emitted.collectives(), *emitted.norms()]
    return CollectivesTable(name, tuple(origins.row(op, each) for op, each in found))


class EmittedOperations:
    """The operations of a program that implement decisions.

    Args:
      program: The operations.
      ledger: The recorded decisions.
      batch: The values of which each device has its own rows.
    """

    def __init__(self, program: Program, ledger: Ledger, batch: Sequence[int]) -> None:
        self._program, self._alive, self._ledger = program, sorted(program.live()), ledger
        self._by_rows = program.reached(batch, lambda op: True, forward=True)
        self._numbers = {
            v
            for op in program.operations
            for v, x in zip(op.operands, op.eqn.invars, strict=True)
            if v is not None and not getattr(x.aval, "shape", ())
        }
        self._followed: dict[int, Decisions] = {}
        self._complete: set[int] = set()
        seen: set[int] = set()
        held: set[int] = set()
        for at in self._alive:
            op = program.operations[at]
            for number in ledger.numbers(op.names):  # the outermost first
                if number in held:
                    break
                if number in seen:
                    continue
                seen.add(number)
                if ledger.is_complete(number):
                    self._complete.add(at)
                if self._by_other_rows(op):
                    self._followed[at] = _all_reduced(ledger[number]) if op.name == "gather" else ()
                    continue
                self._followed[at] = ledger[number]
                if ledger.replaces(number):
                    held.add(number)
                    break
            if (spec := self._of_optimizer(op)) is not None and at not in self._followed:
                self._followed[at] = ledger.of_optimizer(op.eqn.outvars[0].aval, spec)

    def collectives(self) -> Iterator[tuple[Operation, Decision]]:
        """Yields the operations for which XLA sends data, with their decisions, in order."""
        dropped, numbers = self._merged(), set[tuple[int, int]]()
        for at in self._alive:
            op, found = self._program.operations[at], self._followed.get(at, ())
            if op.name == "shard_map":
                yield from _between_stages(op)
            if at in dropped or (found and found[0].kind in _REDUCTIONS and not self._partial(at)):
                continue
            if op.name in LOOKUPS and found and op.operands[1] is not None:
                key = op.operands[1], op.times
                found = found[1:] if key in numbers else found
                numbers.add(key)  # row numbers are gathered once
            yield from ((op, each) for each in found)

    def norms(self) -> Iterator[tuple[Operation, Decision]]:
        """Yields the operations that return the norm of sharded gradients."""
        if all(
            each.kind != decisions.SCATTER for found in self._followed.values() for each in found
        ):
            return
        for op in (self._program.operations[at] for at in self._alive):
            if op.name == "sqrt" and NORM in op.names:
                yield op, self._ledger.of_norm()

    def _by_other_rows(self, op: Operation) -> bool:
        """Returns whether an operation reads or adds rows by indices equal on all devices."""
        return op.name in LOOKUPS and op.operands[1] not in self._by_rows

    def _of_optimizer(self, op: Operation) -> Spec | None:
        """Returns the spec to which the optimizer's input constrains a gradient; else None."""
        if op.name != "sharding_constraint" or op.operands[0] is None:
            return None
        producer = self._program.producers.get(op.operands[0])
        marked = producer is not None and marks.is_mark(
            self._program.operations[producer].eqn, marks.GRADIENT
        )
        return target_specs.spec_of(op.eqn) if marked else None

    def _partial(self, at: int) -> bool:
        """Returns whether each device has a partial sum as operand of an operation. Otherwise each
        device has the full value: moved, or computed element by element, from parameters, constants
        and gradients that are already reduced."""
        pending = [v for v in self._program.operations[at].operands if v is not None]
        found: set[int] = set()
        while pending:
            v = pending.pop()
            if v in found:
                continue
            found.add(v)
            pending += self._program.sources[v]
            producer = self._program.producers.get(v)
            if producer is None or producer in self._complete:
                continue
            if followed := self._followed.get(producer):
                if followed[-1].partly:
                    return True
                continue
            op = self._program.operations[producer]
            if op.by_element:
                pending += [x for x in self._program.needed(producer, v) if x not in self._numbers]
            elif v in self._by_rows and not self._adds_exchanged(op):
                return True
        return False

    def _adds_exchanged(self, op: Operation) -> bool:
        """Returns whether an operation sums exchanged values, such as quantized codes."""
        if op.name != "reduce_sum":
            return False
        start = [v for v in op.operands if v is not None]
        values = self._program.reached(start, lambda op: op.by_element, forward=False)
        producers = (self._followed.get(self._program.producers.get(v, -1)) for v in values)
        return any(found and found[0].kind == decisions.EXCHANGE for found in producers)

    def _merged(self) -> set[int]:
        """Returns the positions of the reductions whose result is only added to the result of an
        equal reduction: XLA then adds first, and reduces once."""
        users, reduced = self._program.users, dict[int, tuple[int, Decisions]]()
        merged: set[int] = set()
        for at in self._alive:
            op, found = self._program.operations[at], self._followed.get(at)
            if found and found[0].kind in _REDUCTIONS:
                reduced.update(dict.fromkeys(op.results, (at, found)))
            terms = [reduced[v] for v in op.operands if v in reduced and len(users[v]) == 1]
            if len(terms) != len(op.operands):
                continue
            match op.name, terms:
                case (("add" | "add_any"), [(one, sent), (other, same)]) if (
                    sent == same and one != other
                ):
                    merged.add(one)
                    reduced[op.results[0]] = other, same
                case (("transpose" | "reshape" | "squeeze"), [term]):
                    reduced[op.results[0]] = term
        return merged


def _between_stages(op: Operation) -> Iterator[tuple[Operation, Decision]]:
    """Yields the arrays that a pipeline's stages send to their neighbours."""
    program = Program(jaxprs.param(op.eqn, "jaxpr"))
    for inner in (program.operations[at] for at in sorted(program.live())):
        if inner.name == "ppermute" and STAGE in jaxprs.param(inner.eqn, "axis_name"):
            (x,) = (v.aval for v in inner.eqn.outvars)
            sent = x.size * x.dtype.itemsize
            reason = "a micro-batch goes to the neighbour in each tick"
            place = decisions.STAGES, reason
            decision = Decision(decisions.PERMUTE, x.shape, x.dtype.name, sent, 2, *place)
            yield op._replace(times=op.times * inner.times), decision


def _all_reduced(found: Decisions) -> Decisions:
    """Returns the decisions of a lookup whose rows are equal on all devices: only an all-reduce."""
    return tuple(
        dataclasses.replace(each, kind=decisions.REDUCE)
        for each in found
        if each.kind == decisions.SCATTER
    )
