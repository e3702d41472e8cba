"""Dataflow analyses: a fact for each value of a program, by one rule per primitive.

A fact states what is known of a value: whether the value depends on an argument, say, or whether
an equation needs it unsharded. A transfer rule maps the facts of an equation's operands to those
of its results (forward), or the facts of its results to those of its operands (backward). The
engine does the rest: it joins the facts of several uses, enters calls, branches and loops, and
repeats a loop until its facts no longer change. Facts are kept by program, so that a rule depends
on nothing but its arguments.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from jax.extend import core

from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.regions import Region, regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, HasEquations, Jaxpr

F = TypeVar("F")
Rule = Callable[[Equation, Sequence[F]], Sequence[F]]
"""Function from an equation and the facts on one side of it to the facts on the other side."""


class Facts(NamedTuple, Generic[F]):
    """Facts of the values of one program.

    Attributes:
      ends: The facts of the results (forward), or of the arguments (backward), in order.
      of: The fact of each variable of the program, without variables of programs inside its
        equations.
    """

    ends: Sequence[F]
    of: Mapping[Atom, F]


class Analysis(Generic[F]):
    """Transfer rules over a join-semilattice of hashable facts.

    Args:
      bottom: The fact of a value of which nothing is known, and of a literal.
      join: The least fact that holds where either of two does: commutative, associative and
        idempotent. A fact can rise only finitely often, so that loops reach a fixpoint.
      unknown: The rule of every primitive that has no other rule and runs no region.
      control: Whether, forward, the results of a ``cond`` or a loop also have the facts of the
        index or condition that decides what runs.
      enters: Whether programs inside equations are analysed. If not, the rule ``unknown`` maps the
        facts of all operands of a call or a loop to those of its results.
      everywhere: Receives the facts of all variables, also of the programs inside equations: the
        joint facts, if several equations run one program.

    Example:
      >>> import operator, jax
      >>> from zerojax.xla.jaxprs import open_jaxpr
      >>> depends = Analysis(False, operator.or_, lambda eqn, ins: [any(ins)] * len(eqn.outvars))
      >>> jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x, y: (x + 1, x * y))(1.0, 2.0))
      >>> depends.forward(jaxpr, [False, True]).ends
      [False, True]
    """

    def __init__(
        self,
        bottom: F,
        join: Callable[[F, F], F],
        unknown: Rule[F],
        *,
        control: bool = True,
        enters: bool = True,
        everywhere: MutableMapping[Atom, F] | None = None,
    ) -> None:
        self._bottom, self._join, self._unknown, self._control = bottom, join, unknown, control
        self._enters, self._everywhere = enters, everywhere
        self._rules: dict[str, Rule[F]] = {}
        # A layer that many equations run is analysed once for each set of facts of its arguments.
        self._forward_once = cached_by_jaxpr(lambda jaxpr, *given: self._forward(jaxpr, given))
        self._backward_once = cached_by_jaxpr(lambda jaxpr, *given: self._backward(jaxpr, given))

    def rule(self, *primitives: str) -> Callable[[Rule[F]], Rule[F]]:
        """Registers a transfer rule for primitives, by their names. For a primitive that runs
        regions, the rule replaces the analysis of its regions.

        Raises:
          ValueError: One of the primitives already has a rule.
        """

        def register(rule: Rule[F]) -> Rule[F]:
            if twice := self._rules.keys() & {*primitives}:
                raise ValueError(f"two rules for {', '.join(sorted(twice))}")
            self._rules.update(dict.fromkeys(primitives, rule))
            return rule

        return register

    def forward(self, jaxpr: HasEquations, given: Sequence[F]) -> Facts[F]:
        """Returns the facts of an open jaxpr, computed from those of its arguments."""
        return self._forward_once(jaxpr, *given)

    def backward(self, jaxpr: HasEquations, needed: Sequence[F]) -> Facts[F]:
        """Returns the facts of an open jaxpr, computed from those of its results."""
        return self._backward_once(jaxpr, *needed)

    def _forward(self, jaxpr: HasEquations, given: Sequence[F]) -> Facts[F]:
        """Computes facts from the first equation of a program to its last."""
        # Constants of the program are no arguments, and get the bottom.
        env = defaultdict(lambda: self._bottom, zip(jaxpr.invars, given, strict=True))
        run = functools.partial(self._across, self.through)
        return self._noted(jaxprs.interpret(jaxpr, env, run, lambda literal: self._bottom), env)

    def _noted(self, ends: Sequence[F], env: Mapping[Atom, F]) -> Facts[F]:
        if (known := self._everywhere) is not None:
            known.update((v, self._join(known.get(v, fact), fact)) for v, fact in env.items())
        return Facts(ends, env)

    def _across(self, through: Rule[F], equation: Equation, facts: Sequence[F]) -> Sequence[F]:
        """Computes the facts on the other side of an equation.

        Args:
          through: The rule of primitives that run regions and have no other rule.
          equation: The equation.
          facts: The facts of its operands (forward), or of its results (backward).
        """
        rule = through if self._enters and regions(equation) else self._unknown
        return self._rules.get(equation.primitive.name, rule)(equation, facts)

    def through(self, equation: Equation, operands: Sequence[F]) -> Sequence[F]:
        """Computes the facts of results from those of operands, through the programs inside. A rule
        for a primitive that runs regions may start from these facts."""
        inside = regions(equation)
        results = [self._bottom] * len(equation.outvars)
        taken = {i for region in inside for i in region.operands}
        deciding = [fact for i, fact in enumerate(operands) if i not in taken]  # a choice's index
        # A condition reads what the body carries on: its facts need those of the body's results.
        for region in inside[::-1]:  # the body of a loop before its condition
            given = [operands[i] for i in region.operands]
            if region.decides:
                # The last arguments of a condition are the carry, which is what the loop returns.
                carried = len(given) - len(results)
                given[carried:] = map(self._join, given[carried:], results)
                deciding += self.forward(region.jaxpr, given).ends
            else:
                ends = self._fixpoint(self.forward, region, given, region.carries)
                results = list(map(self._join, results, ends))
        for fact in deciding if self._control else ():
            results = [self._join(each, fact) for each in results]
        return results

    def _fixpoint(
        self,
        direction: Callable[[Jaxpr, Sequence[F]], Facts[F]],
        region: Region,
        given: Sequence[F],
        carries: Sequence[tuple[int, int]],
    ) -> list[F]:
        """Computes the facts on the far side of a program, repeated until those of a loop no longer
        change.

        Args:
          direction: :meth:`forward` or :meth:`backward`.
          region: The program.
          given: The facts on its near side.
          carries: Pairs of positions: on the far side, and where the next iteration, or backward
            the iteration before, takes this fact on the near side.
        """
        while True:
            found, grown = [*direction(region.jaxpr, given).ends], list(given)
            for far, near in carries:
                grown[near] = self._join(grown[near], found[far])
            if grown == given:
                # Of a loop without iterations, the results are the start values.
                for far, near in carries if region.may_be_skipped else ():
                    found[far] = self._join(found[far], given[near])
                return found
            given = grown

    def _backward(self, jaxpr: HasEquations, needed: Sequence[F]) -> Facts[F]:
        """Computes facts from the last equation of a program to its first."""
        env: dict[Atom, F] = {}

        def add(atom: Atom, fact: F) -> None:
            if not isinstance(atom, core.Literal):
                env[atom] = self._join(env[atom], fact) if atom in env else fact

        for v, fact in zip(jaxpr.outvars, needed, strict=True):
            add(v, fact)
        # All uses of a value come after its equation, so that its fact is complete there.
        for equation in reversed(jaxpr.eqns):
            results = [env.get(v, self._bottom) for v in equation.outvars]
            operands = self._across(self.back_through, equation, results)
            for v, fact in zip(equation.invars, operands, strict=True):
                add(v, fact)
        return self._noted([env.get(v, self._bottom) for v in jaxpr.invars], env)

    def back_through(self, equation: Equation, results: Sequence[F]) -> Sequence[F]:
        """Computes the facts of operands from those of results, as :meth:`through` does the
        reverse."""
        operands = [self._bottom] * len(equation.invars)
        for region in regions(equation):
            needed = [self._bottom] if region.decides else list(results)
            back = [(argument, result) for result, argument in region.carries]
            found = self._fixpoint(self.backward, region, needed, back)
            for position, fact in zip(region.operands, found, strict=True):
                operands[position] = self._join(operands[position], fact)
        return operands
