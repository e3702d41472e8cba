"""Abstract interpretation of a step: how each value depends on the rows of the batch.

Two traces are interpreted together, on the global batch and on a micro-batch, because only their
shapes show which dimensions hold rows. :mod:`zerojax.graph.analysis` interprets one program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

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
    Path,
    grows,
    is_sum,
    refused,
)
from zerojax.accumulation.flat import Flat
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
from zerojax.accumulation.lines import line, where
from zerojax.accumulation.pairs import EquationPair, Sizes, other_literals, pairs, scaled
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, HasEquations


class Analysis(EquationAnalysis):
    """One pass over a step.

    Args:
      global_flat, micro_flat: The step traced on the global batch and on a micro-batch.
      given: The kinds of its arguments.
      choices: See :class:`Choices`.
      hopeful: Whether to record a conflict and continue as if it were resolved.
      neighbours: See :class:`zerojax.accumulation.pairs.Sizes`.
      sizes: The rows of both; None for those of the first argument with rows.

    Attributes:
      pairs: The equations of both traces, matched.
      kinds: The kind of each variable of ``global_flat``.
      literals: Paths of equations that need the micro-batch's own number of rows.

    Raises:
      UnevenError: The two programs differ in more than shapes.
    """

    def __init__(
        self,
        global_flat: Flat,
        micro_flat: Flat,
        given: Sequence[RowKind],
        choices: Choices,
        hopeful: bool,
        neighbours: bool = True,
        sizes: Sizes | None = None,
    ) -> None:
        if sizes is None:
            both = zip(global_flat.invars, micro_flat.invars, given, strict=True)
            n, m = next((w.aval.shape[0], m.aval.shape[0]) for w, m, k in both if k.rows)
            sizes = Sizes(n, m, neighbours)
        super().__init__(sizes, choices, hopeful)
        self.literals: set[Path] = set()
        self._global = set[Path]()  # equations of numbers of rows that are the global batch's
        self.kinds: dict[Atom, RowKind] = {}
        self.pairs: list[EquationPair] = []
        self._bound, self._inside = global_flat.bound, dict[Path, Equation]()
        self._run(global_flat, micro_flat, given, (), False, self.kinds, self.pairs)

    def kind(self, atom: Atom) -> RowKind:
        """Returns the kind of a variable of ``global_flat``, or of a literal."""
        return _literal(atom) if isinstance(atom, core.Literal) else self.kinds[atom]

    def equation(self, path: Path) -> Equation | None:
        """Returns the equation at a path, on the global batch; None for a sum that a loop over the
        rows carries."""
        return self.pairs[path[0]].global_eqn if len(path) == 1 else self._inside.get(path)

    def place(self, path: Path) -> tuple[object, ...] | None:
        """Returns where the user's program binds an equation, call by call, see
        :func:`zerojax.xla.jaxprs.bound_at`; None if unknown."""
        inside = (self._inside.get(path[:n]) for n in range(3, len(path) + 1, 2))
        within = [jaxprs.source(eqn).traceback for eqn in inside if eqn is not None]
        places = [jaxprs.bound_at(x) for x in (*self._bound[path[0]], *within)]
        # For a function of jax that is traced separately, only the place of the call is known.
        return tuple(x for x, _ in itertools.groupby(filter(None, places))) or None

    def _run(
        self,
        global_program: HasEquations,
        micro_program: HasEquations,
        given: Sequence[RowKind],
        path: Path,
        backward: bool,
        env: dict[Atom, RowKind],
        matched: list[EquationPair],
    ) -> Kinds:
        """Interprets a program, and returns the kinds of its results."""
        for w, m in zip(global_program.constvars, micro_program.constvars, strict=False):
            env[w] = FIXED if w.aval.shape == m.aval.shape else _constant(w, m)
        env.update(zip(global_program.invars, given, strict=True))

        def read(atom: Atom) -> RowKind:
            return _literal(atom) if isinstance(atom, core.Literal) else env[atom]

        for i, pair in enumerate(pairs(global_program, micro_program, self.sizes)):
            matched.append(pair)
            eqn = pair.global_eqn
            kinds = [read(v) for v in eqn.invars]
            here = (*path, i)
            if path:
                self._inside[here] = eqn
            later = backward or jaxprs.is_transposed(eqn)
            outs = self._sized(pair, kinds, here, self._equation(pair, kinds, here, later))
            for v, kind in zip(eqn.outvars, outs, strict=True):
                if not path:  # the step itself
                    kind = FIXED if v in self.choices.first else kind.but(home=v)
                env[v] = kind
            if any(k.name == "own" or k.index for k in outs):
                self.literals.add(here)
        return [read(v) for v in global_program.outvars]

    def _sized(self, pair: EquationPair, kinds: Kinds, path: Path, outs: Kinds) -> Kinds:
        """Follows numbers of rows, such as the divisor of a variance, to their uses: a value of
        the micro-batch takes the number of its own rows, any other that of the global batch."""
        sizes = frozenset[Path]().union(*(k.sizes for k in kinds))
        if all(k.name == "fixed" for k in outs):
            if any(map(other_literals, pair.global_eqn.invars, pair.micro_eqn.invars)):
                sizes |= {path}
            return [k.but(sizes=sizes) for k in outs]
        is_own = any(k.name == "own" for k in outs)
        mine, others = (self.literals, self._global) if is_own else (self._global, self.literals)
        if not sizes.isdisjoint(others):
            return refused(pair.global_eqn, SIZES)
        mine |= sizes
        return outs

    def _equation(self, pair: EquationPair, kinds: Kinds, path: Path, backward: bool) -> Kinds:
        """Returns the kinds of an equation's results, by the rule for the kinds of its operands."""
        eqn = pair.global_eqn
        if not eqn.outvars:
            return []
        if not backward:
            kinds = [k.added for k in kinds]
        if bad := [k for k in kinds if k.name == "mixed"]:
            return [_located(bad[0], eqn).but(home=None)] * len(eqn.outvars)
        if any(k.name == "row" for k in kinds):
            return self.of_row(eqn, kinds)
        has_rows = any(k.rows for k in kinds)
        if jaxprs.programs(eqn) and (
            has_rows or grows(pair) or any(k.name == "own" for k in kinds)
        ):
            return self._within(pair, kinds, path, backward)
        if has_rows or grows(pair):
            return self.of_rows(pair, kinds, path, backward)
        if any(k.needs_all_rows for k in kinds):
            return self.of_numbers(eqn, kinds, path, backward)
        if any(k.name == "own" for k in kinds):
            return [RowKind("own", adds=is_sum(eqn, kinds), **together(kinds))] * len(eqn.outvars)
        return self.of_fixed(pair, kinds)

    def _within(self, pair: EquationPair, kinds: Kinds, path: Path, backward: bool) -> Kinds:
        """Returns the kinds of an equation whose inner programs involve rows of the batch."""
        inside = {prims.scan_p: self._scan, prims.while_p: self._while, prims.cond_p: self._cond}
        if run := inside.get(pair.global_eqn.primitive):
            outs = run(pair, kinds, path, backward)
        else:
            outs = self._body(map(jaxprs.called_jaxpr, pair), kinds, path, backward)
        return [_located(k, pair.global_eqn) for k in outs]

    def _body(
        self,
        inner: Iterable[AnyJaxpr],
        kinds: Sequence[RowKind],
        path: Path,
        backward: bool,
        at: int = 0,
    ) -> Kinds:
        global_jaxpr, micro_jaxpr = (jaxprs.open_jaxpr(j)[0] for j in inner)
        return self._run(global_jaxpr, micro_jaxpr, kinds, (*path, at), backward, {}, [])

    def _scan(self, pair: EquationPair, kinds: Kinds, path: Path, backward: bool) -> Kinds:
        """Returns the kinds of a scan's results: the body is interpreted until the kinds of the
        carry no longer change. A scan that is longer on the global batch loops over the rows
        themselves."""
        eqn, micro = pair
        if jaxprs.param(eqn, "length") != jaxprs.param(micro, "length"):
            return self._over_rows(pair, kinds, path, backward)
        a, n = jaxprs.scan_counts(eqn)
        consts, xs = kinds[:a], kinds[a + n :]
        carry = [k.but(home=None) for k in kinds[a : a + n]]
        if any(x.rows and x.dim == 0 for x in xs):
            return refused(eqn, MIXES)
        sliced = [x.but(dim=x.dim - 1) if x.rows else x for x in xs]
        inner = [jaxprs.param(eqn, "jaxpr"), jaxprs.param(micro, "jaxpr")]
        for _ in range(len(carry) + 3):
            outs = self._body(inner, [*consts, *carry, *sliced], path, backward)
            new = [join(old, o, where(eqn)) for old, o in zip(carry, outs[:n], strict=True)]
            if [_shape_of(k) for k in new] == [_shape_of(k) for k in carry]:
                break
            carry = new
        stacked = [y.but(dim=y.dim + 1) if y.rows else y for y in outs[n:]]
        return [k.but(home=None) for k in (*new, *stacked)]

    def _over_rows(self, pair: EquationPair, kinds: Kinds, path: Path, backward: bool) -> Kinds:
        """Returns the kinds of a loop over the rows themselves, such as ``lax.map``. Each row must
        be independent of the others, except in sums."""
        eqn, micro = pair
        a, n = jaxprs.scan_counts(eqn)
        xs = kinds[a + n :]
        outers = {k.outer for k in xs if k.rows} - {None}
        if any(k.rows for k in kinds[: a + n]) or any(k.index for k in xs) or len(outers) > 1:
            return refused(eqn, MIXES)
        carry = [RowKind("sum", learned=k.learned) if k.zero else k for k in kinds[a : a + n]]
        row_kinds = [RowKind("row", learned=k.learned) if k.rows else k for k in xs]
        inner = [jaxprs.param(eqn, "jaxpr"), jaxprs.param(micro, "jaxpr")]
        outs = self._body(inner, [*kinds[:a], *carry, *row_kinds], path, backward)
        body = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))[0]
        kept = [out is given for out, given in zip(body.outvars, body.invars[a:], strict=False)]
        results: Kinds = []
        for i, (old, new) in enumerate(zip(carry, outs[:n], strict=True)):
            if not kept[i] and (old.name, new.name) != ("sum", "sum"):
                return refused(eqn, LOOPS)
            key = (*path, 0, ~i)  # matches no equation of the loop
            self.backward[key] = backward
            results.append(new.but(home=None, node=Node(key) if new.reduced else None))
        for w, m, kind in zip(eqn.outvars[n:], micro.outvars[n:], outs[n:], strict=True):
            plain = scaled(w.aval, m.aval) == [0] and kind.name in ("row", "fixed")
            rows = RowKind("rows", dim=0, outer=next(iter(outers), 1), learned=kind.learned)
            results.append(rows if plain else mixed(LOOPS, where(eqn)))
        return results

    def _while(self, pair: EquationPair, kinds: Kinds, path: Path, backward: bool) -> Kinds:
        """Returns the kinds of a ``while`` loop's results; they are "mixed" if its condition is
        neither fixed nor a micro-batch's own."""
        eqn = pair.global_eqn
        loops = [jaxprs.while_parts(e) for e in pair]
        a = loops[0].cond_consts
        b = a + loops[0].body_consts
        carry = [k.but(home=None) for k in kinds[b:]]
        for _ in range(len(carry) + 3):
            bodies = [loop.body for loop in loops]
            outs = self._body(bodies, [*kinds[a:b], *carry], path, backward)
            new = [join(old, o, where(eqn)) for old, o in zip(carry, outs, strict=True)]
            if [_shape_of(k) for k in new] == [_shape_of(k) for k in carry]:
                break
            carry = new
        conds = [loop.cond for loop in loops]
        (going,) = self._body(conds, [*kinds[:a], *carry], path, backward, 1)
        if going.name not in ("fixed", "own"):
            return [mixed(LASTS, where(eqn))] * len(new)
        return [k.but(home=None) for k in new]

    def _cond(self, pair: EquationPair, kinds: Kinds, path: Path, backward: bool) -> Kinds:
        """Returns the kinds that the results of all branches have in common; refuses an index that
        is computed from all rows."""
        eqn, micro = pair
        index, *operands = kinds
        if index.name not in ("fixed", "own"):
            return refused(eqn, CHOOSES)
        both = zip(jaxprs.param(eqn, "branches"), jaxprs.param(micro, "branches"), strict=True)
        branches = [self._body(b, operands, path, backward, i) for i, b in enumerate(both)]
        outs = branches[0]
        for other in branches[1:]:
            outs = [join(a, b, where(eqn)) for a, b in zip(outs, other, strict=True)]
        return [mixed(MIXES, where(eqn)) if k.name == "global" else k.but(home=None) for k in outs]


def _located(kind: RowKind, call: Equation) -> RowKind:
    """Adds the user's line of the enclosing call to a kind's problem that has no line."""
    if kind.problem is None or " at " in kind.problem.where:
        return kind
    place = line(jaxprs.source(call).traceback)
    return kind if place is None else mixed(kind.problem.why, f"{kind.problem.where} at {place}")


def _literal(atom: Atom) -> RowKind:
    return ZERO if jaxprs.is_zero(atom) else FIXED


def _constant(w: Atom, m: Atom) -> RowKind:
    return mixed(BRINGS, f"shape {w.aval.shape}")


def _shape_of(kind: RowKind) -> RowKind:
    """Returns the fields of a kind that must not change from one iteration of a loop to the
    next."""
    return kind.but(node=None, home=None, guarded=(), problem=None)
