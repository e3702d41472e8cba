"""Abstract interpretation of a step on symbolic rows: how each value depends on the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.equation_analysis import (
    BRINGS,
    CHOOSES,
    LASTS,
    LOOPS,
    MIXES,
    SIZES,
    Choices,
    EquationAnalysis,
    Place,
    Reduction,
    is_sum,
    refused,
)
from zerojax.accumulation.kinds import (
    FIXED,
    ZERO,
    Kinds,
    Node,
    RowKind,
    join,
    mixed,
    together,
)
from zerojax.accumulation.symbolic import Symbolic, growing, grows, is_symbolic
from zerojax.graph.def_use import graph_of
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.lines import line, where
from zerojax.xla.types import AnyJaxpr, Atom, Equation, HasEquations


class Analysis(EquationAnalysis):
    """One pass over a step.

    Args:
      symbolic: The step.
      given: The kinds of its arguments.
      rows: Rows of a micro-batch.
      choices: See :class:`Choices`.
      hopeful: Whether to record a conflict and continue as if it were resolved.
      neighbours: Whether a micro-batch has rows that are neighbours in the batch, so that groups of
        neighbours stay together.

    Attributes:
      kinds: The kind of each variable of the step.
      own: What has the number of rows of the micro-batch, see
        :func:`zerojax.accumulation.instances.instance`.
    """

    def __init__(
        self,
        symbolic: Symbolic,
        given: Sequence[RowKind],
        rows: int,
        choices: Choices,
        *,
        hopeful: bool = False,
        neighbours: bool = True,
    ) -> None:
        super().__init__(symbolic, rows, choices, hopeful=hopeful, neighbours=neighbours)
        self.own = set[Atom]()
        self._of_all = set[Atom]()  # numbers of rows that are the global batch's
        self._numbers = {v: FIXED.but(sizes=frozenset([v])) for v in symbolic.numbers}
        self.kinds: dict[Atom, RowKind] = {}
        self._run(symbolic.flat, given, (), False, self.kinds)

    def kind(self, atom: Atom) -> RowKind:
        """Returns the kind of a variable of the step, of a literal or a number of rows."""
        return _of_literal(atom) if isinstance(atom, core.Literal) else self.kinds[atom]

    def bound(self, place: Place) -> tuple[object, ...] | None:
        """Returns where the user's program binds an equation, call by call, see
        :func:`zerojax.xla.jaxprs.bound_at`; None if unknown."""
        flat = self.symbolic.flat
        calls = flat.bound[graph_of(flat).place(place[0])]
        within = [source.traceback for source in map(jaxprs.source, place[1:])]
        places = [jaxprs.bound_at(x) for x in (*calls, *within)]
        # For a function of jax that is traced separately, only the place of the call is known.
        return tuple(x for x, _ in itertools.groupby(filter(None, places))) or None

    def bound_reduction(self, key: Atom) -> tuple[object, ...] | None:
        """Returns where the user's program binds a reduction, by its first result."""
        return self.bound(self.reductions[key].place)

    def _run(
        self,
        program: HasEquations,
        given: Sequence[RowKind],
        within: Place,
        backward: bool,
        env: dict[Atom, RowKind],
    ) -> Kinds:
        """Interprets a program, and returns the kinds of its results."""
        for v in program.constvars:
            env[v] = FIXED
            if growing(v):
                env[v] = mixed(BRINGS, f"shape {self.symbolic.global_shape(v)}")
        env |= self._numbers | dict(zip(program.invars, given, strict=True))

        def run(eqn: Equation, kinds: Kinds) -> Kinds:
            later = backward or jaxprs.is_transposed(eqn)
            outs = self._sized(eqn, kinds, self._equation(kinds, (*within, eqn), later))
            if within:
                return outs
            first, pairs = self.choices.first, zip(eqn.outvars, outs, strict=True)
            return [FIXED if v in first else kind.but(home=v) for v, kind in pairs]

        return jaxprs.interpret(program, env, run, _of_literal)

    def _sized(self, eqn: Equation, kinds: Kinds, outs: Kinds) -> Kinds:
        """Follows numbers of rows, such as the divisor of a variance, to their uses: a value of
        the micro-batch takes the number of its own rows, any other that of the global batch."""
        sizes = frozenset[Atom]().union(*(k.sizes for k in kinds))
        if all(k.name == "fixed" for k in outs):
            return [k.but(sizes=sizes) for k in outs]
        here = self.symbolic.numbers.keys() & {*jaxprs.variables(eqn.invars)}
        is_own = any(k.name == "own" for k in outs)
        if is_own or any(k.index for k in outs):
            self.own.update(here, eqn.outvars[:1])
        mine, others = (self.own, self._of_all) if is_own else (self._of_all, self.own)
        if not (sizes - here).isdisjoint(others):
            return refused(eqn, SIZES)
        mine |= sizes - here
        return outs

    def _equation(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of an equation's results, by the rule for the kinds of its operands."""
        eqn = place[-1]
        if not eqn.outvars:
            return []
        # Behind the backward pass, a micro-batch's share of a gradient stands for the sum.
        if not backward:
            kinds = [k.added for k in kinds]
        if bad := [k for k in kinds if k.name == "mixed"]:
            return [_located(bad[0], eqn).but(home=None)] * len(eqn.outvars)
        if any(k.name == "row" for k in kinds):
            return self.of_row(eqn, kinds)
        has_rows = any(k.rows for k in kinds) or grows(eqn)
        if jaxprs.programs(eqn) and (has_rows or any(k.name == "own" for k in kinds)):
            return self._within(kinds, place, backward)
        if has_rows:
            return self.of_rows(kinds, place, backward)
        if any(k.needs_all_rows for k in kinds):
            return self.of_numbers(kinds, place, backward)
        if any(k.name == "own" for k in kinds):
            return [RowKind("own", adds=is_sum(eqn, kinds), **together(kinds))] * len(eqn.outvars)
        return self.of_fixed(eqn, kinds)

    def _within(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of an equation whose inner programs involve rows of the batch."""
        inside = {prims.scan_p: self._scan, prims.while_p: self._while, prims.cond_p: self._cond}
        if run := inside.get(place[-1].primitive):
            outs = run(kinds, place, backward)
        else:
            outs = self._body(jaxprs.called_jaxpr(place[-1]), kinds, place, backward)
        return [_located(k, place[-1]) for k in outs]

    def _body(
        self, inner: AnyJaxpr, kinds: Sequence[RowKind], place: Place, backward: bool
    ) -> Kinds:
        return self._run(jaxprs.open_jaxpr(inner)[0], kinds, place, backward, {})

    def _scan(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of a scan's results: the body is interpreted until the kinds of the
        carry no longer change. A scan that is longer on the global batch loops over the rows
        themselves."""
        loop = jaxprs.scan_parts(place[-1])
        if is_symbolic(loop.length):
            return self._over_rows(loop, kinds, place, backward)
        consts, start, xs = loop.operands(kinds)
        if any(x.rows and x.dim == 0 for x in xs):
            return refused(place[-1], MIXES)
        sliced = [x.but(dim=x.dim - 1) if x.rows else x for x in xs]

        def run(carry: Kinds) -> Kinds:
            return self._body(loop.body, [*consts, *carry, *sliced], place, backward)

        _, carry, entries = _through_iterations(run, start, place[-1])
        stacked = [y.but(dim=y.dim + 1) if y.rows else y for y in entries]
        return [k.but(home=None) for k in (*carry, *stacked)]

    def _over_rows(self, loop: ScanParts, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of a loop over the rows themselves, such as ``lax.map``. Each row must
        be independent of the others, except in sums."""
        eqn = place[-1]
        consts, start, xs = loop.operands(kinds)
        outers = {k.outer for k in xs if k.rows} - {None}
        if any(k.rows for k in (*consts, *start)) or any(k.index for k in xs) or len(outers) > 1:
            return refused(eqn, MIXES)
        # A carry that begins with zeros may add up rows; another start would be added k times.
        carry = [RowKind("sum", learned=k.learned) if k.zero else k for k in start]
        row_kinds = [RowKind("row", learned=k.learned) if k.rows else k for k in xs]
        outs = self._body(loop.body, [*consts, *carry, *row_kinds], place, backward)
        body = jaxprs.open_jaxpr(loop.body)[0]
        _, given, _ = loop.operands(body.invars)
        sums, stacked = loop.results(outs)
        results: Kinds = []
        for i, (old, new) in enumerate(zip(carry, sums, strict=True)):
            # A carry that iterations return as it is may be any number.
            if body.outvars[i] is not given[i] and (old.name, new.name) != ("sum", "sum"):
                return refused(eqn, LOOPS)
            key = eqn.outvars[i]
            self.reductions[key] = Reduction(place, backward, in_loop=True)
            results.append(new.but(home=None, node=Node(key) if new.reduced else None))
        for v, kind in zip(loop.results(eqn.outvars)[1], stacked, strict=True):
            plain = growing(v) == [0] and kind.name in ("row", "fixed")
            rows = RowKind("rows", dim=0, outer=next(iter(outers), 1), learned=kind.learned)
            results.append(rows if plain else mixed(LOOPS, where(eqn)))
        return results

    def _while(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of a ``while`` loop's results; they are "mixed" if its condition is
        neither fixed nor a micro-batch's own."""
        eqn = place[-1]
        loop = jaxprs.while_parts(eqn)
        a = loop.cond_consts
        b = a + loop.body_consts

        def run(carry: Kinds) -> Kinds:
            return self._body(loop.body, [*kinds[a:b], *carry], place, backward)

        carry, new, _ = _through_iterations(run, kinds[b:], eqn)
        (going,) = self._body(loop.cond, [*kinds[:a], *carry], place, backward)
        if going.name not in ("fixed", "own"):
            return [mixed(LASTS, where(eqn))] * len(new)
        return [k.but(home=None) for k in new]

    def _cond(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds that the results of all branches have in common; refuses an index that
        is computed from all rows."""
        eqn = place[-1]
        index, *operands = kinds
        if index.name not in ("fixed", "own"):
            return refused(eqn, CHOOSES)
        branches = jaxprs.param(eqn, "branches")
        outs, *others = [self._body(b, operands, place, backward) for b in branches]
        for other in others:
            outs = [join(a, b, where(eqn)) for a, b in zip(outs, other, strict=True)]
        return [mixed(MIXES, where(eqn)) if k.name == "global" else k.but(home=None) for k in outs]


def _through_iterations(
    run: Callable[[Kinds], Kinds], start: Sequence[RowKind], loop: Equation
) -> tuple[Kinds, Kinds, Kinds]:
    """Interprets a loop's body until the kinds of the carry no longer change.

    Args:
      run: Function from the kinds of the carry to those of an iteration's results.
      start: The kinds of the carry before the loop.
      loop: The loop.

    Returns:
      The kinds of the carry before and after the last iteration, and those of its other results.
    """
    carry = [k.but(home=None) for k in start]
    for _ in range(len(carry) + 3):
        outs = run(carry)
        new = [join(old, o, where(loop)) for old, o in zip(carry, outs, strict=False)]
        if [_shape_of(k) for k in new] == [_shape_of(k) for k in carry]:
            break
        carry = new
    return carry, new, outs[len(carry) :]


def _of_literal(literal: Atom) -> RowKind:
    return ZERO if jaxprs.is_zero(literal) else FIXED


def _located(kind: RowKind, call: Equation) -> RowKind:
    """Adds the user's line of the enclosing call to a kind's problem that has no line."""
    if kind.problem is None or " at " in kind.problem.where:
        return kind
    place = line(jaxprs.source(call).traceback)
    return kind if place is None else mixed(kind.problem.why, f"{kind.problem.where} at {place}")


def _shape_of(kind: RowKind) -> RowKind:
    """Returns the fields of a kind that must not change from one iteration of a loop to the
    next."""
    return kind.but(node=None, home=None, guarded=(), problem=None)
