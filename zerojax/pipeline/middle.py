"""The equations between the forward and the backward pass of the layers: final norm, head, loss.

With the schedule 1F1B they run for one micro-batch at a time, between its two passes through the
layers. Sums over rows that they compute, the loss and the gradients of the head, are added up over
the micro-batches; rows that later equations use are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend import core

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import MIXES, Choices
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.kinds import FIXED, RowKind, mixed
from zerojax.accumulation.lines import where
from zerojax.accumulation.literals import with_global_sizes
from zerojax.accumulation.pairs import EquationPair, Sizes, scaled
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import CALLBACKS, DRAWS, FACTORIZATIONS, KERNELS, PRODUCTS
from zerojax.pipeline.loop import LayerLoop
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation

_NOT_AGAIN = (DRAWS - {"random_bits"}) | PRODUCTS | FACTORIZATIONS | KERNELS | CALLBACKS
"""Primitives before the layers whose results a micro-batch brings along. Others run again for each
micro-batch (targets, one-hot vectors, masks), which is cheaper than to send their results."""


class Middle(NamedTuple):
    """The equations between the two passes of a micro-batch through the layers.

    Attributes:
      equations: The equations, on the global batch and on one device's rows of one micro-batch; the
        latter have the numbers of the global batch.
      entering: By variable with rows that is known before the layers, its kind.
      fixed: Other variables that the equations use, and that are known before the layers.
      crossing: By variable that equations use later, its kind: rows, or a reduction over rows.
    """

    equations: Sequence[EquationPair]
    entering: Mapping[Atom, RowKind]
    fixed: Sequence[Atom]
    crossing: Mapping[Atom, RowKind]


class ObstacleError(Exception):
    """The reason why the equations cannot run for one micro-batch at a time, a verb first."""


class Between:
    """The equations between two loops over layers, as the flat programs of a step have them.

    Args:
      flat: The step on the global batch.
      both: Its equations, matched with those on one device's rows of one micro-batch.
      forward, backward: The loops.
      micro_of: The variable of the micro-batch for each of the global batch.
      sizes: The numbers of rows.
    """

    def __init__(
        self,
        flat: Flat,
        both: Sequence[EquationPair],
        forward: LayerLoop,
        backward: LayerLoop,
        micro_of: Mapping[Atom, Atom],
        sizes: Sizes,
    ) -> None:
        self._flat, self._both, self._micro_of, self._sizes = flat, both, micro_of, sizes
        self._forward, self._backward = forward, backward
        self._first, self._last = forward.global_equation, backward.global_equation
        self._graph = graph_of(flat)
        self._reached = reached_from(flat.eqns, self._first.outvars)
        late = reached_from(flat.eqns, self._last.outvars)
        self._places = [
            i
            for i, eqn in enumerate(flat.eqns)
            if eqn is not self._last
            and not self._reached.isdisjoint(operands := jaxprs.variables(eqn.invars))
            and late.isdisjoint(operands)
        ]

    def middle(self) -> Middle:
        """Returns what a micro-batch computes between its passes through the layers.

        Raises:
          ObstacleError: The backward pass of one micro-batch needs other micro-batches.
        """
        at_hand = self._reached | {*jaxprs.variables(_moving(self._forward))}
        while True:
            program, small = self._programs(at_hand)
            kinds = [*map(self._given, program.invars)]
            choices, sizes = Choices(), self._sizes
            analysis = Analysis(program, small, kinds, choices, hopeful=False, sizes=sizes)
            inside = self._inside(analysis, program)
            chosen = {v for i in inside for v in program.eqns[i].outvars}
            # Values before the layers that mix rows are known for the global batch.
            mixed_before = {
                v for eqn in program.eqns for v in eqn.outvars if v not in self._reached | chosen
            }
            if not mixed_before:
                break
            at_hand |= mixed_before
        self._check(analysis, chosen)
        eqns = with_global_sizes(analysis)
        pairs = [EquationPair(program.eqns[i], eqns[i]) for i in inside]
        used = dict.fromkeys(v for pair in pairs for v in jaxprs.variables(pair.global_eqn.invars))
        outside = [v for v in used if v not in chosen and v not in self._reached]
        rows = {v: self._kind(v) for v in outside if self._rows(v)}
        fixed = [v for v in outside if v not in rows]
        return Middle(pairs, rows, fixed, self._crossing(analysis, pairs))

    def _programs(self, at_hand: Collection[Atom]) -> tuple[Flat, Flat]:
        """Returns the equations that may run for each micro-batch, on the global batch and on the
        rows of one micro-batch."""
        eqns = self._flat.eqns

        def is_known(v: Atom) -> bool:
            eqn = self._graph.producer(v)
            again = eqn is not None and not (
                eqn.primitive.name in _NOT_AGAIN or jaxprs.programs(eqn) or eqn.effects
            )
            return v in at_hand or not self._rows(v) or not again

        given = [v for i in self._places for v in jaxprs.variables(eqns[i].invars)]
        given += jaxprs.variables(_moving(self._backward))
        again = self._graph.backward_slice(given, is_known).equations
        places = sorted({*self._places, *map(self._graph.place, again)})
        program = Flat([], [self._both[i].global_eqn for i in places])
        small = Flat([], [self._both[i].micro_eqn for i in places])
        computed = {v for eqn in program.eqns for v in eqn.outvars}
        used = dict.fromkeys(v for eqn in program.eqns for v in jaxprs.variables(eqn.invars))
        program.invars = [v for v in used if v not in computed]
        small.invars = [self._micro_of[v] for v in program.invars]
        return program, small

    def _inside(self, analysis: Analysis, program: Flat) -> list[int]:
        """Returns the positions of the equations that micro-batches can compute: rows, or
        reductions of rows."""
        n = jaxprs.scan_counts(self._first)[1]
        inside, stacked = list[int](), {*self._first.outvars[n:]}
        known = {v for v in program.invars if not analysis.kind(v).reduced} - stacked
        for i, eqn in enumerate(program.eqns):
            kinds = [analysis.kind(v).added for v in (*eqn.invars, *eqn.outvars)]
            outs = kinds[len(eqn.invars) :]
            possible = known.issuperset(jaxprs.variables(eqn.invars)) and not eqn.effects
            if possible and any(k.rows for k in kinds) and all(k.rows or k.reduced for k in outs):
                inside.append(i)
                known.update(eqn.outvars)
        return inside

    def _given(self, v: Atom) -> RowKind:
        """Returns the kind of a value from outside."""
        results = dict(zip(self._first.outvars, self._forward.results, strict=True))
        kind = results.get(v, FIXED)
        return kind.but(home=None, node=None) if kind.reduced else self._kind(v)

    def _rows(self, v: Atom) -> list[int]:
        """Returns the dimensions of a variable that hold rows."""
        return scaled(v.aval, self._micro_of[v].aval)

    def _kind(self, v: Atom) -> RowKind:
        dims = self._rows(v)
        if len(dims) > 1:
            return mixed(MIXES, where(self._graph.producer(v) or self._first), v.aval.shape)
        return RowKind("rows", dim=dims[0], outer=1) if dims else FIXED

    def _check(self, analysis: Analysis, chosen: Collection[Atom]) -> None:
        """Refuses a backward pass that needs other values than rows of the micro-batch."""
        eqn, loop = self._last, self._backward
        stop, at = sum(jaxprs.scan_counts(loop.equation)), where(eqn)
        results = dict(zip(self._first.outvars, self._forward.results, strict=True))
        for j, v in enumerate(eqn.invars):
            if isinstance(v, core.Literal):
                continue
            if v not in self._reached:
                if loop.is_stored(j):
                    raise ObstacleError(f"reads rows for each layer that no layer kept ({at})")
            elif (kind := results.get(v)) is not None:
                if kind.reduced or (j < stop and not kind.rows):
                    raise ObstacleError(f"computes with sums over all rows ({at})")
            else:
                _check_kind(analysis.kind(v), eqn)
                if v not in chosen or j >= stop:
                    raise ObstacleError(f"computes with sums over all rows ({at})")
        if any(map(loop.stores, range(len(loop.results)))):
            raise ObstacleError(f"returns rows of each layer ({at})")
        if any(map(self._forward.is_stored, range(len(self._first.invars)))):
            raise ObstacleError(f"reads rows for each layer ({where(self._first)})")

    def _crossing(self, analysis: Analysis, pairs: Sequence[EquationPair]) -> dict[Atom, RowKind]:
        """Returns the values that later equations use."""
        inside = {id(pair.global_eqn) for pair in pairs} | {id(self._last)}
        needed = {*jaxprs.variables(self._flat.outvars)}
        for eqn in self._flat.eqns:
            if id(eqn) not in inside:
                needed.update(jaxprs.variables(eqn.invars))
        results = zip(self._first.outvars, self._forward.results, strict=True)
        kinds = {v: kind for v, kind in results if kind.rows}
        kept = [v for j, v in enumerate(self._first.outvars) if self._forward.stores(j)]
        if not needed.isdisjoint(kept):
            raise ObstacleError(f"uses rows that each layer returns ({where(self._first)})")
        for pair in pairs:
            outs = (v for v in pair.global_eqn.outvars if v in self._reached)
            kinds |= {v: analysis.kind(v).added for v in outs}
        crossing = {v: kind for v, kind in kinds.items() if v in needed}
        for v, kind in crossing.items():
            _check_kind(kind, self._graph.producer(v) or self._first)
        return crossing


def reached_from(eqns: Iterable[Equation], start: Iterable[Atom]) -> set[Atom]:
    """Returns the variables that depend on ``start``, with these."""
    reached = {*start}
    for eqn in eqns:
        if not reached.isdisjoint(jaxprs.variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def _moving(loop: LayerLoop) -> list[Atom]:
    """Returns the operands with rows that go from stage to stage."""
    stop = sum(jaxprs.scan_counts(loop.equation))
    both = zip(loop.global_equation.invars[:stop], loop.operands, strict=False)
    return [v for v, kind in both if kind.rows]


def _check_kind(kind: RowKind, eqn: Equation) -> None:
    if kind.problem is not None:
        raise ObstacleError(f"{kind.problem.why} ({kind.problem.where})")
    if kind.index:
        raise ObstacleError(f"computes with the numbers of rows within the batch ({where(eqn)})")
    if kind.rows and kind.outer not in (None, 1):
        raise ObstacleError(f"has the rows in another order than the batch ({where(eqn)})")
