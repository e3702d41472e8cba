"""A traced step as one list of equations: calls are inlined, loops and checkpoints are not.

The list can be cut into programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.reductions import REDUCES
from zerojax.graph.def_use import graph_of
from zerojax.graph.reach import EQUATION_DEPENDS
from zerojax.graph.search import contains, runs_regions
from zerojax.trace.dependence import unchanged
from zerojax.xla import jaxprs
from zerojax.xla.lines import line
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, SourceInfo, Traceback

_SMALL = 1 << 20
"""Elements of a constant whose numbers are looked at."""


@dataclass(repr=False, eq=False)
class Flat:
    """A program without calls, in the form of an open jaxpr.

    Attributes:
      invars, outvars: Arguments and results, as in a jaxpr; results may be literals.
      eqns: Equations in order.
      constvars, consts: Variables and values of the arrays that the program closes over.
      bound: For each equation, the tracebacks of the calls around it, outermost first, and its own.
    """

    invars: list[Atom]
    eqns: list[Equation] = field(default_factory=list)
    outvars: list[Atom] = field(default_factory=list)
    constvars: list[Atom] = field(default_factory=list)
    consts: list[jax.Array] = field(default_factory=list)
    bound: list[tuple[Traceback | None, ...]] = field(default_factory=list)


def flatten(
    closed: AnyJaxpr,
    learned: Collection[int],
    batch: Collection[int] = (),
    keeps: Collection[core.Primitive] = (prims.remat_p,),
) -> Flat:
    """Inlines calls of a jaxpr that run their body once on their own operands.

    Reductions inside a checkpoint that do not depend on ``learned`` arguments, such as the sum of
    a mask, are moved out of the checkpoint. The updates that a scatter-add adds to an array that
    does not depend on the batch, such as counts in the state, are summed separately first.

    Args:
      closed: A jaxpr with its constants.
      learned: Positions of the arguments that training changes.
      batch: Positions of the arguments that are leaves of the batch.
      keeps: Primitives of calls that are not inlined; by default checkpoints, because inlining
        would lose what they save.
    """
    return _Opener(closed, learned, batch, keeps).flat


class _Opener:
    """The inlining of one program, see :func:`flatten`.

    Attributes:
      flat: The result.
    """

    def __init__(
        self,
        closed: AnyJaxpr,
        learned: Collection[int],
        batch: Collection[int],
        keeps: Collection[core.Primitive],
    ) -> None:
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        self._known: dict[object, bool] = {}
        self._keeps = keeps
        self.flat = Flat([jaxprs.new_variable(v.aval) for v in jaxpr.invars])
        self._learned = {v for i, v in enumerate(self.flat.invars) if i in learned}
        self._zeros = set[Atom]()
        self._batch = {v for i, v in enumerate(self.flat.invars) if i in batch}
        self.flat.outvars = self._open(jaxpr, consts, self.flat.invars, None, ())

    def _open(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[jax.Array],
        args: Sequence[Atom],
        outer: SourceInfo | None,
        calls: tuple[Traceback | None, ...],
    ) -> list[Atom]:
        """Appends the equations of a jaxpr applied to ``args``, and returns its results.

        Args:
          outer: The source of the call that runs the jaxpr; None for the program itself.
          calls: Tracebacks of all enclosing calls.
        """
        env = dict(zip(jaxpr.invars, args, strict=True))
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            first = next(iter(graph_of(jaxpr).users(v)), None)
            if first and (made := _equal_or_counting(value, first.equation)) is not None:
                (env[v],) = self._open(*jaxprs.open_jaxpr(made), (), outer, calls)
                continue
            env[v] = jaxprs.new_variable(v.aval)
            self.flat.constvars.append(env[v])
            self.flat.consts.append(value)

        def run(eqn: Equation, values: list[Atom]) -> list[Atom]:
            info = jaxprs.source(eqn)
            bound = (*calls, info.traceback)
            if outer is not None:
                own = self._users_own(info.traceback)
                info = jaxprs.source_within(outer, info, own_line=own)
            if (body := self._body(eqn, values)) is not None:
                inner, inner_consts = jaxprs.open_jaxpr(body)
                outs = self._open(inner, inner_consts, values, info, bound)
            else:
                # A checkpoint stays one equation, of which no part can run before the
                # micro-batches.
                if eqn.primitive is prims.remat_p:
                    eqn, values = self._without_numbers(eqn, values, info, bound)
                outs = [jaxprs.new_variable(v.aval) for v in eqn.outvars]
                self.flat.eqns.append(eqn.replace(invars=values, outvars=outs, source_info=info))
                self.flat.bound.append(bound)
                for known in (self._learned, self._batch):
                    if not known.isdisjoint(jaxprs.variables(values)):
                        known.update(outs)
                if eqn.primitive is prims.broadcast_in_dim_p and jaxprs.is_zero(values[0]):
                    self._zeros.update(outs)
            return _through_loop(eqn, values, outs)

        return jaxprs.interpret(jaxpr, env, run, lambda literal: literal)

    def _users_own(self, traceback: Traceback | None) -> bool:
        """Returns whether a traceback has a line of the user's code."""
        # Inside a function of a library there is none: jax traces it once for all callers.
        if traceback not in self._known:
            self._known[traceback] = line(traceback) is not None
        return self._known[traceback]

    def _body(self, eqn: Equation, values: Sequence[Atom]) -> AnyJaxpr | None:
        """Returns the jaxpr to inline in place of an equation; None if the equation stays."""
        if eqn.primitive in jaxprs.CALLS:
            return None if eqn.primitive in self._keeps else jaxprs.called_jaxpr(eqn)
        # Rows added to zeros are a sum over rows. Rows added to counts of the state are none: each
        # micro-batch would add these counts, too.
        if eqn.primitive is lax.scatter_add_p and values[0] not in self._zeros:
            operand_depends, *updates_depend = (
                not self._batch.isdisjoint(jaxprs.variables([v])) for v in values
            )
            return (
                _scatter_add_to_zeros(eqn) if any(updates_depend) and not operand_depends else None
            )
        return None

    def _without_numbers(
        self,
        eqn: Equation,
        values: list[Atom],
        info: SourceInfo,
        bound: tuple[Traceback | None, ...],
    ) -> tuple[Equation, list[Atom]]:
        """Moves reductions that do not depend on learned arguments out of a checkpoint; returns
        the checkpoint that takes them as further operands, and its operands."""
        inner = jaxprs.param(eqn, "jaxpr")
        are_learned = [not self._learned.isdisjoint(jaxprs.variables([v])) for v in values]
        depends = EQUATION_DEPENDS.forward(inner, are_learned).of
        learned = {v for v, is_learned in depends.items() if is_learned}

        def count(each: Equation, are_counted: Sequence[bool]) -> list[bool]:
            shrinks = len(each.outvars) == 1 and (_reduces(each) or _small(each, are_counted))
            return [shrinks and learned.isdisjoint(each.outvars)] * len(each.outvars)

        counted = dict.fromkeys((*inner.constvars, *inner.invars), False)
        jaxprs.interpret(inner, counted, count, lambda literal: False)
        graph = graph_of(inner)
        numbers = [
            v
            for v, is_counted in counted.items()
            if is_counted
            and not all(any(map(counted.get, use.equation.outvars)) for use in graph.users(v))
        ]
        if not numbers:
            return eqn, values
        outside = inner.replace(
            eqns=graph.where(lambda eqn: learned.isdisjoint(eqn.outvars)), outvars=numbers
        )
        counts = self._open(outside, (), values, info, bound)
        inside = inner.replace(
            invars=[*inner.invars, *numbers],
            eqns=graph.where(lambda eqn: {*numbers}.isdisjoint(eqn.outvars)),
        )
        return eqn.replace(params=eqn.params | {"jaxpr": inside}), [*values, *counts]


def _equal_or_counting(value: Any, use: Equation) -> core.ClosedJaxpr | None:
    """Returns a program for an array that holds one number, or counts up from 0 along a dimension,
    such as ``np.ones`` and ``np.arange``, at the line of its ``use``; None for others. Its equation
    may have rows of the batch, which a constant may not have."""
    # An array from outside the step may be an argument of the program around it.
    if isinstance(value, jax.core.Tracer):
        return None
    known = isinstance(value, np.ndarray) or getattr(value, "is_fully_addressable", False)
    if not known or not 1 < value.size <= _SMALL or value.dtype.kind not in "biuf":
        return None
    array = np.asarray(value)
    with jaxprs.traced_where(use):
        for d, n in enumerate(array.shape):
            if n > 1 and (np.moveaxis(array, d, -1) == np.arange(n)).all():
                return jax.make_jaxpr(
                    lambda d=d: lax.broadcasted_iota(array.dtype, array.shape, d)
                )()
        if (array == array.flat[0]).all():
            return jax.make_jaxpr(lambda: lax.full(array.shape, array.flat[0], array.dtype))()
    return None


def _through_loop(eqn: Equation, values: Sequence[Atom], outs: Sequence[Atom]) -> list[Atom]:
    """Returns the results of an equation; of a ``scan`` that returns operands unchanged, as flax's
    returns the parameters of layers, those operands."""
    if (scan := jaxprs.scan_parts(eqn)) is None:
        return [*outs]
    carried, stacked = scan.results(unchanged(jaxprs.open_jaxpr(scan.body)[0]))
    own = [at == scan.consts + i for i, at in enumerate(carried)]
    own += [at is not None and at >= scan.first_stack for at in stacked]
    sources = zip(outs, [*carried, *stacked], own, strict=True)
    return [values[at] if is_own else out for out, at, is_own in sources]


def _reduces(eqn: Equation) -> bool:
    """Returns whether an equation shrinks an array by a reduction."""
    return _shrinks(eqn) and contains(eqn, _is_reduction, enters=runs_regions)


def _shrinks(eqn: Equation) -> bool:
    largest = max((v.aval.size for v in eqn.invars), default=0)
    return all(v.aval.size < largest for v in eqn.outvars)


def _is_reduction(eqn: Equation) -> bool:
    return eqn.primitive.name in REDUCES and _shrinks(eqn)


def _small(eqn: Equation, are_counted: Sequence[bool]) -> bool:
    """Returns whether some of an equation's operands are counted, and its result is no larger than
    the largest of them."""
    given = [v.aval.size for v in itertools.compress(eqn.invars, are_counted)]
    return bool(given) and eqn.outvars[0].aval.size <= max(given)


def _scatter_add_to_zeros(eqn: Equation) -> core.ClosedJaxpr:
    """Returns a closed jaxpr that scatter-adds to zeros first, and then adds the operand."""

    def run(operand: jax.Array, *added: jax.Array) -> jax.Array:
        (total,) = jaxprs.bind(eqn, [jnp.zeros_like(operand), *added])
        return operand + total

    return jax.make_jaxpr(run)(*(jaxprs.like(v.aval) for v in eqn.invars))
