"""A step split into the equations that run for each micro-batch and those that run once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.instances import global_instance, instance
from zerojax.accumulation.kinds import RowKind
from zerojax.accumulation.symbolic import Symbolic
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import LABELS, LINEAR, RESHAPES, SCALES
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation

_ONE_TO_ONE = LABELS | RESHAPES | LINEAR | SCALES


@dataclass(frozen=True)
class Crossing:
    """A value that is reduced over all micro-batches.

    Attributes:
      variable: The variable of the step on the global batch.
      how: The name of a reduction, see :data:`zerojax.accumulation.reductions.REDUCTIONS`.
      spec: The spec of a gradient; None for other values.
      wide: True if the value is a float of fewer than 32 bits, and all equations of ``once`` that
        use the value first convert it to float32 or wider.
    """

    variable: Atom
    how: str
    spec: Spec | None
    wide: bool


class ByPart(NamedTuple):
    """A result of the step that each micro-batch computes.

    Attributes:
      position: Its position among the results.
      kind: Its kind after all micro-batches.
      averaged: Whether it is averaged over the micro-batches.
    """

    position: int
    kind: RowKind
    averaged: bool = False


@dataclass(frozen=True)
class Split:
    """The programs of a step under accumulation, all on the step's arguments and further values.

    Attributes:
      first: Runs on the global batch; returns the values that depend only on the batch.
      micro: Runs for each micro-batch; takes those values after its arguments, and returns
        ``crossing``, the values of the last micro-batch that ``once`` needs, ``stacked`` and
        ``carry``.
      once: Takes the values of ``first``, ``crossing`` and the last micro-batch after its
        arguments.
      crossing: The values that are reduced over all micro-batches.
      n_last: Number of values of the last micro-batch.
      stacked: The step's results that each micro-batch computes.
      carry: Positions of the arguments that each micro-batch computes for the next.
      done: Positions of the results that ``once`` computes.
    """

    first: Flat
    micro: Flat
    once: Flat
    crossing: tuple[Crossing, ...]
    n_last: int
    stacked: tuple[ByPart, ...]
    carry: tuple[int, ...]
    done: tuple[int, ...]


def split(
    symbolic: Symbolic,
    analysis: Analysis,
    rows: int,
    first: Collection[Atom],
    stacked: Sequence[ByPart],
    carry: Mapping[int, Atom],
    wants: Mapping[Atom, Spec],
) -> Split:
    """Splits a step.

    Args:
      symbolic: The step.
      analysis: Its analysis.
      rows: Rows of a micro-batch.
      first: Variables that depend only on the batch.
      stacked: The results that each micro-batch computes.
      carry: By position among the arguments, the variable with the next micro-batch's argument.
      wants: The specs of gradients, by variable.

    Raises:
      UnevenError: The step is not known for as many rows.
    """
    flat = symbolic.flat
    graph = graph_of(flat)
    early = graph.in_order(first)
    chosen = _Once(symbolic, analysis, {*early}, {*carry.values()}, wants)
    by_part = [x.position for x in stacked]
    done = [i for i in range(len(flat.outvars)) if i not in by_part]
    chosen.need(flat.outvars[i] for i in done)
    effects = graph.where(lambda eqn: bool(eqn.effects))
    chosen.need_effects(effects)
    crossing = tuple(
        Crossing(
            v,
            analysis.kind(v).added.name,
            wants.get(v),
            # Micro-batches add up in float32, which need not be rounded to be widened again.
            _is_half(v) and chosen.taken_wide(v),
        )
        for v in chosen.crossing
    )
    last = list(chosen.last)
    outs = [*chosen.crossing, *last, *(flat.outvars[i] for i in by_part), *carry.values()]
    once = dataclasses.replace(
        flat,
        invars=[*flat.invars, *early, *chosen.crossing, *last],
        eqns=[*map(chosen.eqns.__getitem__, sorted(chosen.eqns))],
        outvars=[flat.outvars[i] for i in done],
    )
    return Split(
        first=global_instance(symbolic, _part(flat, [], early)),
        micro=instance(
            symbolic,
            _part(flat, early, outs, [x for x in effects if graph.place(x) not in chosen.eqns]),
            rows,
            frozenset(analysis.own),
        ),
        once=global_instance(symbolic, once),
        crossing=crossing,
        n_last=len(last),
        stacked=tuple(stacked),
        carry=tuple(carry),
        done=tuple(done),
    )


class _Once:
    """The equations that run once, and the values that they need from the micro-batches."""

    def __init__(
        self,
        symbolic: Symbolic,
        analysis: Analysis,
        early: set[Atom],
        passed: set[Atom],
        wants: Mapping[Atom, Spec],
    ) -> None:
        self._analysis, self._wants = analysis, wants
        flat = symbolic.flat
        self._available = {*flat.invars, *flat.constvars, *early, *symbolic.numbers}
        self._passed, self._graph = passed, graph_of(flat)
        self.eqns: dict[int, Equation] = {}
        self.crossing: dict[Atom, None] = {}
        self.last: dict[Atom, None] = {}

    def need(self, atoms: Iterable[Atom]) -> None:
        """Adds the equations that compute these values once, and the values that they need from the
        micro-batches: each crosses, or is taken from the last micro-batch."""
        left = list(atoms)
        while left:
            v = left.pop()
            if isinstance(v, core.Literal) or v in self._available:
                continue
            kind = self._analysis.kind(v)
            if v in self._passed:
                self.last[v] = None
            elif kind.added.reduced:
                left += self._cross(v)
            elif kind.name == "own":
                self.last[v] = None
            else:
                assert kind.name in ("fixed", "global"), kind
                left += self._take(v)

    def _take(self, v: Atom) -> list[Atom]:
        """Adds the equation of a variable to those that run once, without the results that need
        rows of the batch, and returns its operands."""
        eqn = self._graph.producer(v)
        if (i := self._graph.place(eqn)) in self.eqns:
            return []
        once = [self._analysis.kind(x).name in ("fixed", "global") for x in eqn.outvars]
        self.eqns[i] = (jaxprs.pruned(eqn, once) if jaxprs.programs(eqn) else None) or eqn
        return list(self.eqns[i].invars)

    def _cross(self, v: Atom) -> list[Atom]:
        """Lets a value cross as early as it is known element by element, so that all uses share the
        crossing; returns further operands of the equations in between."""
        chain = [v]
        while (before := self._one_to_one(chain[-1])) is not None:
            chain.append(before)
        known = [i for i, x in enumerate(chain) if x in self._wants]
        # A gradient crosses where it has a target spec, so that its sum is sharded in the loop.
        position = known[-1] if known else len(chain) - 1
        self.crossing[chain[position]] = None
        return [x for y in chain[:position] for x in self._take(y) if x not in chain]

    def _one_to_one(self, v: Atom) -> Atom | None:
        """Returns the reduced value that ``v`` is computed from element by element, or None."""
        if (eqn := self._graph.producer(v)) is None:
            return None
        operands = jaxprs.variables(eqn.invars)
        numbers = [x for x in operands if self._analysis.kind(x).reduced]
        own = any(self._analysis.kind(x).name == "own" for x in operands)
        if own or eqn.primitive.name not in _ONE_TO_ONE or len(numbers) != 1:
            return None
        (number,) = numbers
        # A broadcast behind the sum would only make the loop carry more.
        alike = number.aval.size == v.aval.size and _same_sort(number, v)
        return number if alike and number not in self._available else None

    def taken_wide(self, v: Atom) -> bool:
        """Returns whether all uses that run once first convert the value to float32 or wider."""
        if self._graph.returned(v):
            return False
        for eqn, _ in self._graph.users(v):
            if self._graph.place(eqn) not in self.eqns:
                continue
            if eqn.primitive.name == "convert_element_type":
                new = eqn.outvars[0].aval.dtype
                if not jnp.issubdtype(new, jnp.floating) or new.itemsize < 4:
                    return False
            elif eqn.primitive.name not in LABELS or not self.taken_wide(eqn.outvars[0]):
                return False
        return True

    def need_effects(self, prints: Iterable[Equation]) -> None:
        """Adds those equations with effects (prints) that are on values that are known once."""
        for each in prints:
            kinds = map(self._analysis.kind, each.invars)
            if all(k.needs_all_rows or k.name == "fixed" for k in kinds):
                self.eqns[self._graph.place(each)] = each
                self.need(each.invars)


def _is_half(v: Atom) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.dtype.itemsize < 4


def _same_sort(one: Atom, other: Atom) -> bool:
    a, b = one.aval.dtype, other.aval.dtype
    return a == b or (jnp.issubdtype(a, jnp.floating) and jnp.issubdtype(b, jnp.floating))


def _part(
    flat: Flat, more: Sequence[Atom], outs: Sequence[Atom], also: Sequence[Equation] = ()
) -> Flat:
    """Returns the part of a program that computes ``outs`` from its arguments and ``more``, with
    the equations ``also``."""
    kept = graph_of(flat).backward_slice(outs, {*more}.__contains__, also=also).equations
    return dataclasses.replace(flat, invars=[*flat.invars, *more], eqns=[*kept], outvars=[*outs])
