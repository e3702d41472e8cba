"""The equations between the forward and the backward pass of the layers: final norm, head, loss.

With the schedule 1F1B they run for one micro-batch at a time, between its two passes through the
layers. Sums over rows that they compute, the loss and the gradients of the head, are added up over
the micro-batches; rows that later equations use are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from zerojax.graph.primitives import BY_ROW, DRAWS, MOVES_OR_ROUNDS
from zerojax.pipeline.loop import LayerLoop
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation

_CHEAP = BY_ROW - DRAWS | MOVES_OR_ROUNDS | {"iota", "random_bits"}
"""Primitives that run again for each micro-batch, where their results would have to be sent along:
targets, one-hot vectors, masks."""


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


class Obstacle(Exception):
    """The reason why the equations cannot run for one micro-batch at a time, a verb first."""


def middle_of(
    flat: Flat,
    both: Sequence[EquationPair],
    forward: LayerLoop,
    backward: LayerLoop,
    micro_of: Mapping[Atom, Atom],
    sizes: Sizes,
) -> Middle:
    """Returns the equations between two loops over layers.

    Args:
      flat: The step on the global batch.
      both: Its equations, matched with those on one device's rows of one micro-batch.
      forward, backward: The loops.
      micro_of: The variable of the micro-batch for each of the global batch.
      sizes: The numbers of rows.

    Raises:
      Obstacle: The backward pass of one micro-batch needs other micro-batches.
    """
    one, other = forward.global_equation, backward.global_equation
    reached, late = reached_from(flat.eqns, one.outvars), reached_from(flat.eqns, other.outvars)

    def grows(v: Atom) -> list[int]:
        return scaled(v.aval, micro_of[v].aval)

    between = [
        i
        for i, eqn in enumerate(flat.eqns)
        if eqn is not other
        and not reached.isdisjoint(operands := jaxprs.variables(eqn.invars))
        and late.isdisjoint(operands)
    ]
    graph = graph_of(flat)

    at_hand = reached | {*jaxprs.variables(moving(forward))}

    def is_known(v: Atom) -> bool:
        eqn = graph.producer(v)
        return v in at_hand or not grows(v) or eqn is None or eqn.primitive.name not in _CHEAP

    given = [v for i in between for v in jaxprs.variables(flat.eqns[i].invars)]
    given += jaxprs.variables(moving(backward))
    again = graph.backward_slice(given, is_known).equations
    places = sorted({*between, *map(graph.place, again)})
    program = Flat([], [both[i].global_eqn for i in places])
    small = Flat([], [both[i].micro_eqn for i in places])
    made = {v for eqn in program.eqns for v in eqn.outvars}
    used = dict.fromkeys(v for eqn in program.eqns for v in jaxprs.variables(eqn.invars))
    program.invars = [v for v in used if v not in made]
    small.invars = [micro_of[v] for v in program.invars]
    results = dict(zip(one.outvars, forward.results, strict=True))
    kinds = []
    for v in program.invars:
        if (kind := results.get(v)) is None or kind.rows:
            kind = _kind(v, grows(v), one)
        kinds.append(kind.but(home=None, node=None) if kind.reduced else kind)
    analysis = Analysis(program, small, kinds, Choices(), hopeful=False, sizes=sizes)
    inside = _inside(analysis, program)
    chosen = {v for i in inside for v in program.eqns[i].outvars}
    _check(analysis, forward, backward, chosen, reached)
    eqns = with_global_sizes(analysis)
    pairs = [EquationPair(program.eqns[i], eqns[i]) for i in inside]
    used = dict.fromkeys(v for pair in pairs for v in jaxprs.variables(pair.global_eqn.invars))
    outside = [v for v in used if v not in chosen and v not in reached]
    n = jaxprs.scan_counts(one)[1]
    known = dict(zip(one.outvars[:n], forward.results, strict=False))
    known = {v: kind for v, kind in known.items() if kind.rows}
    known |= {v: analysis.kind(v).added for v in chosen if v in reached}
    members = {id(pair.global_eqn) for pair in pairs} | {id(other)}
    needed = {*jaxprs.variables(flat.outvars)}
    for eqn in flat.eqns:
        if id(eqn) not in members:
            needed.update(jaxprs.variables(eqn.invars))
    crossing = {v: kind for v, kind in known.items() if v in needed}
    for v, kind in crossing.items():
        _check_kind(kind, graph.producer(v) or one)
    for j, v in enumerate(one.outvars):
        if forward.stores(j) and v in needed:
            raise Obstacle("uses what each layer returns outside of the layers' backward pass")
    rows = {v: _kind(v, grows(v), one) for v in outside if grows(v)}
    return Middle(pairs, rows, [v for v in outside if not grows(v)], crossing)


def reached_from(eqns: Iterable[Equation], start: Iterable[Atom]) -> set[Atom]:
    """Returns the variables that depend on ``start``, with these."""
    reached = {*start}
    for eqn in eqns:
        if not reached.isdisjoint(jaxprs.variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def moving(loop: LayerLoop) -> list[Atom]:
    """Returns the operands with rows that go from stage to stage."""
    stop = sum(jaxprs.scan_counts(loop.equation))
    both = zip(loop.global_equation.invars[:stop], loop.operands, strict=False)
    return [v for v, kind in both if kind.rows]


def _kind(v: Atom, dims: Sequence[int], eqn: Equation) -> RowKind:
    """Returns the kind of a variable by the dimensions that hold rows."""
    if len(dims) > 1:
        return mixed(MIXES, where(eqn), v.aval.shape)
    return RowKind("rows", dim=dims[0], outer=1) if dims else FIXED


def _inside(analysis: Analysis, program: Flat) -> list[int]:
    """Returns the positions of the equations that micro-batches can compute: rows, or reductions
    of rows."""
    inside, known = list[int](), {v for v in program.invars if not analysis.kind(v).reduced}
    for i, eqn in enumerate(program.eqns):
        kinds = [analysis.kind(v).added for v in (*eqn.invars, *eqn.outvars)]
        outs = kinds[len(eqn.invars) :]
        possible = known.issuperset(jaxprs.variables(eqn.invars)) and not eqn.effects
        if possible and any(k.rows for k in kinds) and all(k.rows or k.reduced for k in outs):
            inside.append(i)
            known.update(eqn.outvars)
    return inside


def _check(
    analysis: Analysis,
    forward: LayerLoop,
    backward: LayerLoop,
    chosen: set[Atom],
    reached: set[Atom],
) -> None:
    """Refuses a backward pass that needs other values than rows of the micro-batch."""
    eqn, n = backward.global_equation, jaxprs.scan_counts(backward.equation)
    stop, results = sum(n), dict(zip(forward.global_equation.outvars, forward.results, strict=True))
    for j, v in enumerate(eqn.invars):
        if isinstance(v, core.Literal):
            continue
        kind = results.get(v)
        if v not in reached:
            if backward.is_stored(j):
                raise Obstacle(f"reads rows for each layer that the layers did not keep ({where(eqn)})")
        elif kind is not None:
            if kind.reduced or (j < stop and not kind.rows):
                raise Obstacle(f"computes with sums over all rows ({where(eqn)})")
        elif v in chosen and j < stop and backward.operands[j].rows:
            _check_kind(analysis.kind(v), eqn)
        else:
            found = analysis.kind(v)
            _check_kind(found, eqn)
            raise Obstacle(f"computes with sums over all rows ({where(eqn)})")
    if any(map(backward.stores, range(len(backward.results)))):
        raise Obstacle(f"returns rows of each layer from the backward pass ({where(eqn)})")


def _check_kind(kind: RowKind, eqn: Equation) -> None:
    if kind.problem is not None:
        raise Obstacle(f"{kind.problem.why} ({kind.problem.where})")
    if kind.index:
        raise Obstacle(f"computes with the numbers of rows within the batch ({where(eqn)})")
    if kind.rows and kind.outer not in (None, 1):
        raise Obstacle(f"has the rows in another order than the batch ({where(eqn)})")
