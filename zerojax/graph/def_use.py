"""A graph of values: the equation that produces a value, and the equations that use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from jax.extend import core

from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.primitives import CAST
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr, MaybeNone, Value


class Use(NamedTuple):
    """An equation that takes a value, and the value's position among the operands."""

    equation: Equation
    position: int


class Slice(NamedTuple):
    """The part of a program that computes some of its values.

    Attributes:
      equations: The equations, in order.
      ends: The variables from which they compute: known ones, arguments and constants.
    """

    equations: Sequence[Equation]
    ends: Sequence[Atom]

    @property
    def results(self) -> list[Atom]:
        """The variables that the equations compute, in order."""
        return [v for equation in self.equations for v in equation.outvars]

    def evaluate(self, known: Mapping[Atom, Value]) -> dict[Atom, Value]:
        """Runs the equations; returns the values of all variables, from those of ``ends``."""
        values = dict(known)
        for equation in self.equations:
            operands = [jaxprs.read(v, values) for v in equation.invars]
            values.update(zip(equation.outvars, jaxprs.bind(equation, operands), strict=True))
        return values


class Graph:
    """The equations of one program as a graph of values; programs inside its equations are not
    entered. Literals have no producer and no users.

    Args:
      equations: The equations, in order.
      results: The results of the program.
    """

    def __init__(self, equations: Sequence[Equation], results: Sequence[Atom]) -> None:
        self._equations, self._results = equations, results

    @cached_property
    def _producers(self) -> Mapping[Atom, Equation]:
        return {v: equation for equation in self._equations for v in equation.outvars}

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {id(equation): i for i, equation in enumerate(self._equations)}

    @cached_property
    def _users(self) -> Mapping[Atom, Sequence[Use]]:
        users: dict[Atom, list[Use]] = {}
        for equation in self._equations:
            for i, v in enumerate(equation.invars):
                # A literal has no hash, and is no value of the graph.
                if not isinstance(v, core.Literal):
                    users.setdefault(v, []).append(Use(equation, i))
        return users

    @cached_property
    def _returned(self) -> Mapping[Atom, Sequence[int]]:
        returned: dict[Atom, list[int]] = {}
        for i, v in enumerate(self._results):
            if not isinstance(v, core.Literal):
                returned.setdefault(v, []).append(i)
        return returned

    def producer(self, atom: Atom) -> Equation | MaybeNone:
        """Returns the equation that produces a value; None for an argument, a constant or a
        literal."""
        return None if isinstance(atom, core.Literal) else self._producers.get(atom)

    def is_zeros(self, atom: Atom) -> bool:
        """Returns whether an atom is a literal zero, or a broadcast or cast of one."""
        # jnp.zeros is a broadcast of a literal.
        return jaxprs.is_zero(self.origin(atom, {"broadcast_in_dim", CAST}))

    def origin(self, atom: Atom, names: Collection[str]) -> Atom:
        """Returns the value that becomes ``atom`` through equations of primitives with these names
        alone, as the first operand of each."""
        while (equation := self.producer(atom)) and equation.primitive.name in names:
            atom = equation.invars[0]
        return atom

    def users(self, v: Atom) -> Sequence[Use]:
        """Returns the uses of a variable by equations, in order."""
        return self._users.get(v, ())

    def returned(self, v: Atom) -> Sequence[int]:
        """Returns the positions of a variable among the results."""
        return self._returned.get(v, ())

    def times_used(self, v: Atom) -> int:
        """Counts the uses of a variable, as an operand or as a result."""
        return len(self.users(v)) + len(self.returned(v))

    def in_order(self, values: Collection[Atom]) -> list[Atom]:
        """Returns those of the values that equations produce, in the order of the program."""
        return [v for v in self._producers if v in values]

    def place(self, equation: Equation) -> int:
        """Returns the position of an equation in the program."""
        return self._places[id(equation)]

    def backward_slice(
        self,
        targets: Iterable[Atom],
        is_known: Callable[[Atom], bool] = lambda v: False,
        through: Callable[[Equation], bool] = lambda equation: True,
        operands: Callable[[Equation, Atom], Sequence[Atom]] = lambda equation, v: equation.invars,
        also: Iterable[Equation] = (),
    ) -> Slice:
        """Returns the equations that compute some variables.

        Args:
          targets: The variables.
          is_known: Whether the slice ends at a variable.
          through: Whether an equation may belong to the slice, which otherwise ends at its results.
          operands: The operands of an equation that count for a result of it.
          also: Equations that belong to the slice, with what computes their operands.
        """
        equations = {self.place(equation): equation for equation in also}
        ends: dict[Atom, None] = {}
        todo, seen = [*targets, *jaxprs.operands(equations.values())], set[Atom]()
        while todo:
            v = todo.pop()
            if isinstance(v, core.Literal) or v in seen:
                continue
            seen.add(v)
            equation = None if is_known(v) else self.producer(v)
            if equation is None or not through(equation):
                ends[v] = None
            else:
                equations[self.place(equation)] = equation
                todo += operands(equation, v)
        return Slice([equations[place] for place in sorted(equations)], [*ends])

    def connected(self, start: Atom, joins: Callable[[Atom], bool]) -> Slice:
        """Returns the equations that compute or take ``start``, or values that ``joins`` and that
        such equations connect with it, and the equations on the way from one of them to another."""
        found, todo, seen = dict[int, Equation](), [start], {start}
        while todo:
            v = todo.pop()
            producer = self.producer(v)
            near = [use.equation for use in self.users(v)]
            near += [] if producer is None else [producer]
            found |= {self.place(equation): equation for equation in near}
            atoms = {
                x
                for equation in near
                for x in (*equation.invars, *equation.outvars)
                if not isinstance(x, core.Literal)
            }
            todo += (new := {x for x in atoms - seen if joins(x)})
            seen |= new
        later = {v for equation in found.values() for v in equation.outvars}
        for equation in self.backward_slice(jaxprs.operands(found.values())).equations:
            if not later.isdisjoint(jaxprs.variables(equation.invars)):
                found[self.place(equation)] = equation
                later.update(equation.outvars)
        equations = [found[place] for place in sorted(found)]
        computed = {v for equation in equations for v in equation.outvars}
        return Slice(equations, [v for v in jaxprs.operands(equations) if v not in computed])

    def around(self, part: Slice) -> tuple[list[Equation], list[Equation]]:
        """Returns the equations that run before a part of the program, and those after it: up to
        its end, those are after it that depend on it."""
        last, depends = self.place(part.equations[-1]), {*part.results}
        before, after = list[Equation](), list[Equation]()
        for equation in self.without(part.equations):
            depends_on_it = not depends.isdisjoint(jaxprs.variables(equation.invars))
            depends.update(equation.outvars if depends_on_it else ())
            is_after = depends_on_it or self.place(equation) > last
            (after if is_after else before).append(equation)
        return before, after

    def used_outside(self, part: Slice) -> list[Atom]:
        """Returns the results of a part of the program that the rest of it uses, in order."""
        own = {id(equation) for equation in part.equations}
        return [
            v
            for v in part.results
            if self.returned(v) or any(id(use.equation) not in own for use in self.users(v))
        ]

    def groups(self, key: Callable[[Equation], object]) -> list[list[Equation]]:
        """Returns the equations in groups, in an order in which they can run: those with equal
        keys together, as far as none depends on another.

        Args:
          key: Function from an equation to its key, hashable, or to None. An equation without a key
            is alone. Groups wait until all equations without a key that can run have run.
        """
        depths: dict[Atom, int] = {}  # how many groups run before a variable is known
        groups: dict[tuple[int, bool, object], list[Equation]] = {}
        for i, equation in enumerate(self._equations):
            depth = max([0, *(depths.get(v, 0) for v in jaxprs.variables(equation.invars))])
            together = key(equation)
            is_grouped = together is not None
            place = depth, is_grouped, together if is_grouped else i
            groups.setdefault(place, []).append(equation)
            depths.update(dict.fromkeys(equation.outvars, depth + is_grouped))
        # Keys need not have an order; within a depth a stable sort keeps the program's.
        return [groups[place] for place in sorted(groups, key=lambda place: place[:2])]

    def where(self, test: Callable[[Equation], bool]) -> list[Equation]:
        """Returns the equations for which ``test`` holds, in order."""
        return [equation for equation in self._equations if test(equation)]

    def without(self, equations: Sequence[Equation]) -> list[Equation]:
        """Returns all other equations, in order."""
        left_out = {id(equation) for equation in equations}
        return [equation for equation in self._equations if id(equation) not in left_out]

    def results(self, test: Callable[[Equation], bool]) -> list[Atom]:
        """Returns the results of the equations for which ``test`` holds, in order."""
        return [v for equation in self.where(test) for v in equation.outvars]

    def inputs(self, test: Callable[[Equation], bool]) -> list[Atom]:
        """Returns the variables that the equations for which ``test`` holds take from elsewhere:
        from other equations, or from outside the program."""
        computed = {*self.results(test)}
        return [v for v in jaxprs.operands(self.where(test)) if v not in computed]

    def named(self, *names: str) -> Sequence[Equation]:
        """Returns the equations of primitives with these names, in order."""
        return self.where(lambda equation: equation.primitive.name in names)


@cached_by_jaxpr
def graph_of(jaxpr: Jaxpr) -> Graph:
    """Returns the graph of an open jaxpr, built once."""
    return Graph(jaxpr.eqns, jaxpr.outvars)
