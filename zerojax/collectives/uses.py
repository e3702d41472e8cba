"""The variables that a program needs unsharded, the dtypes in which it needs a parameter unsharded,
and the loops that take the parameter layer by layer."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.collectives import lookups, propagate, sharded_products, target_specs
from zerojax.collectives.carried_sums import wider
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.narrow import widens_integers
from zerojax.graph.analysis import Analysis
from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import BRANCHES, CAST, ELEMENTWISE, LABELS, REDUCTIONS, SLICES
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr

_NOT_SURE = BRANCHES | {"concatenate"}
_Dtypes = frozenset[np.dtype]
_NONE: _Dtypes = frozenset()

# From the position of a result and its spec to the dtypes in which its uses need it unsharded.
_Beyond = Callable[[int, Spec], _Dtypes]


def _unless_added_up(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    return [not propagate.adds_up(eqn)] * len(eqn.invars)


NEEDED: Analysis[bool] = Analysis(False, operator.or_, _unless_added_up)
"""Backward analysis of whether an equation needs a value unsharded, in any layout and scale."""
NEEDED.rule("while", "shard_map")(_unless_added_up)  # their programs are not entered


@NEEDED.rule(*REDUCTIONS)
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    return [False] * len(eqn.invars)


@NEEDED.rule("gather")
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    """A lookup needs its indices unsharded, and only rows of the table."""
    return [False, *(True for _ in eqn.invars[1:])]


@NEEDED.rule(*SLICES)
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    """An array is needed unsharded if its slice is."""
    return [results[0], *(True for _ in eqn.invars[1:])]


@NEEDED.rule(*ELEMENTWISE | LABELS | propagate.FORWARD.keys())
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    if marks.is_mark(eqn, marks.GRADIENT):  # the optimizer's uses are not followed
        return [False]
    size = _size(eqn.outvars[0])
    same_size = [_size(v) == size for v in eqn.invars if not isinstance(v, core.Literal)]
    if not any(same_size):  # a broadcast
        return [True] * len(eqn.invars)
    return [results[0] and _size(v) == size for v in eqn.invars]


@cached_by_jaxpr
def used_unsharded(jaxpr: Jaxpr) -> frozenset[Atom]:
    """Returns the variables of an open jaxpr that an equation needs unsharded, in any layout and
    scale. Lookups do not count, nor do the optimizer's uses of its gradients."""
    needed = NEEDED.backward(jaxpr, [False] * len(jaxpr.outvars)).of
    return frozenset(v for v, is_needed in needed.items() if is_needed) - {*marks.gradients(jaxpr)}


def _size(v: Atom) -> int:
    """Returns the number of elements of a variable; ``aval.size`` takes several times as long."""
    return math.prod(v.aval.shape)


class Uses:
    """The dtypes in which jaxprs need a parameter unsharded when
    :class:`zerojax.collectives.insert.Inserter` runs them.

    Args:
      gatherer: Gathers parameters.
      rows: The dimensions along which rows of the batch lie.
      surely: Leaves out uses that may not gather a parameter that was not gathered in advance:
        branches, concatenations, lookups of rows, products in which a weight stays sharded, and
        loops that take entries of the parameter.
    """

    def __init__(self, gatherer: Gatherer, rows: RowDimensions, *, surely: bool = False) -> None:
        self._gatherer, self._rows, self._surely = gatherer, rows, surely
        self._mesh, self._axis = gatherer.mesh, gatherer.axis

    def dtypes(self, jaxpr: Jaxpr, v: Atom, spec: Spec) -> frozenset[np.dtype]:
        """Returns the dtypes in which an open jaxpr needs its argument ``v`` unsharded: the dtype
        of ``v``, or dtypes to which the jaxpr rounds it."""
        return self._dtypes(jaxpr, v, spec, lambda at, spec: _NONE)

    def _dtypes(self, jaxpr: Jaxpr, v: Atom, spec: Spec, beyond: _Beyond) -> _Dtypes:
        """Returns the dtypes in which a variable, its casts and its other layouts are needed
        unsharded.

        Args:
          jaxpr: an open jaxpr.
          beyond: the dtypes in which the jaxpr's results are needed unsharded.
        """
        graph = graph_of(jaxpr)
        by_equations = [self._use(jaxpr, *use, spec, beyond) for use in graph.users(v)]
        return _NONE.union(*by_equations, *(beyond(at, spec) for at in graph.returned(v)))

    def _use(self, jaxpr: Jaxpr, eqn: Equation, i: int, spec: Spec, beyond: _Beyond) -> _Dtypes:
        """Returns the dtypes in which an equation needs its operand ``i`` unsharded, by itself or
        because a use of its results needs them unsharded."""
        name, v = eqn.primitive.name, eqn.invars[i]
        own_dtype = frozenset([v.aval.dtype])

        def of_result(at: int, spec: Spec) -> _Dtypes:
            return self._dtypes(jaxpr, eqn.outvars[at], spec, beyond)

        if eqn.primitive in jaxprs.CALLS:
            (body,) = jaxprs.bodies(eqn)
            return self._dtypes(body, body.invars[i], spec, of_result)
        if (loop := jaxprs.scan_parts(eqn)) is not None:
            return self._in_loop(loop, i, spec, of_result)
        if marks.is_mark(eqn, marks.SHARD):
            return _NONE
        if name == "shard_map" or (self._surely and self._is_unsure(eqn, i, spec)):
            return _NONE
        if name == "optimization_barrier":
            return of_result(i, spec)
        if eqn.primitive is prims.sharding_constraint_p:
            is_unsharded = target_specs.spec_of(eqn) == layout.without(spec, self._axis)
            return of_result(0, spec) if is_unsharded else own_dtype
        if propagate.follows(eqn) and i == 0:
            moved = spec if name in LABELS else propagate.forward(eqn, spec, self._mesh)
            return own_dtype if moved is None else of_result(0, moved)
        if name == CAST and widens_integers(eqn):
            return own_dtype
        if name == CAST:
            return _of_cast(v, eqn.outvars[0], of_result(0, spec))
        return _NONE if _on_shards(eqn, i) else own_dtype

    def _is_unsure(self, eqn: Equation, i: int, spec: Spec) -> bool:
        if eqn.primitive is prims.gather_p and i == 0:
            return lookups.spec_by_rows(eqn, spec, self._gatherer, self._rows) is not None
        stays = sharded_products.find(eqn, i, spec, self._gatherer) is not None
        return stays or eqn.primitive.name in _NOT_SURE

    def _in_loop(self, loop: ScanParts, i: int, spec: Spec, of_result: _Beyond) -> _Dtypes:
        """Returns the dtypes in which a scan needs its operand ``i`` unsharded. A carried value and
        a stack that is sharded along its layers are always gathered."""
        body, _ = jaxprs.open_jaxpr(loop.body)
        own_dtype = frozenset([body.invars[i].aval.dtype])
        is_stacked = i >= loop.first_stack
        if loop.consts <= i < loop.first_stack or (is_stacked and spec[0] is not None):
            return own_dtype
        if is_stacked and self._surely:
            return _NONE

        def beyond(at: int, spec: Spec) -> _Dtypes:
            return of_result(at, (None, *spec)) if at >= loop.carry else own_dtype

        return self._dtypes(body, body.invars[i], spec[1:] if is_stacked else spec, beyond)


def _of_cast(old: Atom, new: Atom, needed: _Dtypes) -> _Dtypes:
    """Returns the dtypes in which the operand of a cast is needed unsharded, from those of the
    result."""
    if not needed:
        return _NONE
    return frozenset([(new if wider(old, new) else old).aval.dtype])


class Reader(NamedTuple):
    """A loop that takes a stack layer by layer.

    Attributes:
      loop: The scan.
      at: The position of the stack among those that the scan reads.
      cast: Whether the stack is cast before the loop.
    """

    loop: ScanParts
    at: int
    cast: bool


def readers(jaxpr: AnyJaxpr, v: Atom, cast: bool = False) -> Iterator[Reader | None]:
    """Yields the uses that need ``v`` unsharded, in order: a loop that takes it layer by layer, or
    None for another use.

    Args:
      jaxpr: A jaxpr.
      v: One of its variables.
      cast: Whether ``v`` is the result of a cast.
    """
    jaxpr, _ = jaxprs.open_jaxpr(jaxpr)
    graph = graph_of(jaxpr)
    for use in graph.users(v):
        yield from _of_use(jaxpr, *use, cast)
    if graph.returned(v):
        yield None


def _of_use(jaxpr: Jaxpr, eqn: Equation, i: int, cast: bool) -> Iterator[Reader | None]:
    """Yields what :func:`readers` yields for operand ``i`` of one equation."""
    if (loop := jaxprs.scan_parts(eqn)) is not None:
        at = i - loop.first_stack
        yield Reader(loop, at, cast) if at >= 0 else None
    elif eqn.primitive in jaxprs.CALLS and eqn.primitive is not prims.remat_p:
        (body,) = jaxprs.bodies(eqn)
        yield from readers(body, body.invars[i], cast)
    elif eqn.primitive.name == CAST:
        yield from readers(jaxpr, eqn.outvars[0], cast=True)
    elif not _on_shards(eqn, i) and not marks.is_mark(eqn, marks.SHARD):
        yield None


def _on_shards(eqn: Equation, i: int) -> bool:
    """Returns whether an equation runs on the shard of its operand ``i``: a reduction, or an
    element-wise equation, whose result is gathered in place of the operand."""
    name = eqn.primitive.name
    is_elementwise = name in ELEMENTWISE and eqn.outvars[0].aval.shape == eqn.invars[i].aval.shape
    return is_elementwise or name in REDUCTIONS
