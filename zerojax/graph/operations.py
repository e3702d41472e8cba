"""A traced program as one list of operations: calls inlined, loops with their iteration counts.

    program = Program(traced.jaxpr)
    program.operations[0].times, program.live()

Every value has a number. Values that enter or leave a scan, a cond or a while loop are linked to
the values that they come from, so that a search for the origin or the use of a value sees one
graph. :class:`zerojax.graph.def_use.Graph` is the graph of one program without those inside it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import primitives as prims

from zerojax.graph.primitives import ELEMENTWISE, GENERAL_SUMS, MOVES_OR_ROUNDS
from zerojax.graph.regions import regions
from zerojax.graph.search import runs_regions
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr


class Operation(NamedTuple):
    """One equation that is not a call, a loop or a cond; a ``shard_map`` is one operation.

    Attributes:
      eqn: The equation.
      operands: The numbers of its operands; None for literals.
      results: The numbers of its results.
      times: How often it runs in a step.
      exact: False inside a loop whose number of iterations is unknown; such a loop counts once.
      names: The name stack of the equation, after those of enclosing calls.
    """

    eqn: Equation
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    times: int
    exact: bool
    names: str

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.eqn.primitive.name)

    @property
    def by_element(self) -> bool:
        """True if the operation moves an array's elements, or computes with each separately."""
        if self.name in GENERAL_SUMS:  # true only over dimensions of size 1
            return self.eqn.invars[0].aval.size == self.eqn.outvars[0].aval.size
        return self.name in ELEMENTWISE or self.name in MOVES_OR_ROUNDS


class Program:
    """A closed jaxpr as operations in order.

    Attributes:
      operations: All operations.
      arguments, results: The numbers of the program's arguments and results; None for a result that
        is a literal.
      producers, users: For each value, the position of the operation that returns it, and the
        positions of those that take it.
      sources, targets: For each value, the values that it comes from, and those that it becomes,
        at the ends of loops and conds.
    """

    def __init__(self, closed: AnyJaxpr) -> None:
        self.operations: list[Operation] = []
        self.producers: dict[int, int] = {}
        self.users: dict[int, list[int]] = defaultdict(list)
        self.sources: dict[int, list[int]] = defaultdict(list)
        self.targets: dict[int, list[int]] = defaultdict(list)
        self._count = 0
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        self.arguments: list[int] = self._new(len(jaxpr.invars))
        self.results: list[int | None] = self._add(jaxpr, self.arguments, 1, True, "")

    def live(self) -> set[int]:
        """Returns the positions of the operations from which a result or an effect is computed.
        Each result of an ``optimization_barrier`` needs only its own operand, as in XLA."""
        alive = {i for i, op in enumerate(self.operations) if op.eqn.effects}
        start = [v for i in alive for v in self.operations[i].operands if v is not None]
        start += [v for v in self.results if v is not None]
        found = self.reached(start, lambda op: True, forward=False)
        return alive | {self.producers[v] for v in found if v in self.producers}

    def needed(self, at: int, result: int) -> list[int]:
        """Returns the operands of an operation that one of its results needs."""
        op = self.operations[at]
        if op.name == "optimization_barrier":
            operand = op.operands[op.results.index(result)]
            return [] if operand is None else [operand]
        return [v for v in op.operands if v is not None]

    def reached(
        self, start: Sequence[int], through: Callable[[Operation], bool], *, forward: bool
    ) -> set[int]:
        """Returns the values that :meth:`search` finds."""
        return {v for v, _ in self.search(start, through, forward=forward)}

    def search(
        self, start: Iterable[int], through: Callable[[Operation], bool], *, forward: bool
    ) -> Iterator[tuple[int, list[Operation]]]:
        """Searches for the values that are computed from ``start``, or those that ``start`` is
        computed from, across the operations that ``through`` accepts. Yields each value, nearest
        first, and the operations at which the search ends there."""
        links = self.targets if forward else self.sources
        left, found = deque(start), set[int]()
        while left:
            v = left.popleft()
            if v in found:
                continue
            found.add(v)
            left += links[v]
            ends = []
            for position in self.users[v] if forward else self._producer(v):
                op = self.operations[position]
                if not through(op):
                    ends.append(op)
                elif forward:
                    left += [r for r in op.results if v in self.needed(position, r)]
                else:
                    left += self.needed(position, v)
            yield v, ends

    def _producer(self, v: int) -> list[int]:
        return [self.producers[v]] if v in self.producers else []

    def _new(self, n: int) -> list[int]:
        self._count += n
        return list(range(self._count - n, self._count))

    def _links(self, sources: Sequence[int | None], targets: Sequence[int | None]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if source is not None and target is not None:
                self.sources[target].append(source)
                self.targets[source].append(target)

    def _add(
        self, jaxpr: Jaxpr, given: Sequence[int | None], times: int, exact: bool, names: str
    ) -> list[int | None]:
        """Appends the operations of an open jaxpr, and returns the numbers of its results."""
        env: dict[Atom, int | None] = dict(zip(jaxpr.invars, given, strict=True))
        env.update(zip(jaxpr.constvars, self._new(len(jaxpr.constvars)), strict=True))

        def add(eqn: Equation, operands: list[int | None]) -> Sequence[int | None]:
            within = f"{names}/{_names(eqn)}"
            if runs_regions(eqn):
                return self._enter(eqn, operands, times, exact, within)
            results, position = self._new(len(eqn.outvars)), len(self.operations)
            operation = Operation(eqn, tuple(operands), tuple(results), times, exact, within)
            self.operations.append(operation)
            self.producers.update(dict.fromkeys(results, position))
            for v in {v for v in operands if v is not None}:
                self.users[v].append(position)
            return results

        return jaxprs.interpret(jaxpr, env, add, lambda literal: None)

    def _enter(
        self, eqn: Equation, operands: Sequence[int | None], times: int, exact: bool, names: str
    ) -> Sequence[int | None]:
        """Appends the operations of the programs that an equation runs, and returns the numbers of
        its results."""
        inside = regions(eqn)
        if eqn.primitive in jaxprs.CALLS:
            return self._add(inside[0].jaxpr, operands, times, exact, names)
        loops = eqn.primitive is prims.while_p
        if (scan := jaxprs.scan_parts(eqn)) is not None:
            times *= scan.length
        results = self._new(len(eqn.outvars))
        for region in inside:
            given = self._new(len(region.jaxpr.invars))
            self._links([operands[position] for position in region.operands], given)
            outs = self._add(region.jaxpr, given, times, exact and not loops, names)
            carried = given[len(given) - len(results) :] if loops else []
            if region.decides:
                self._links(results, carried)
                outs = outs * len(results)
            for result, argument in region.carries:
                self._links([outs[result]], [given[argument]])
            self._links(outs, results)
            self._links(carried, results[: len(carried)])  # a loop of no iterations
        if eqn.primitive is prims.cond_p:
            self._links([operands[0]] * len(results), results)
        return results


def _names(eqn: Equation) -> str:
    return str(jaxprs.source(eqn).name_stack)
