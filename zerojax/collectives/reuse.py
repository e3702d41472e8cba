"""Gradients from which the body computes another gradient.

The optimizer's gradients are reduce-scattered where they are computed. So are the gradients from
which the step computes another one: the vector of a Hessian-vector product, the gradient in a
penalty, the direction to the worst point nearby. The body continues with the shard of such a
gradient: element-wise equations run on the shard, and it is gathered where an equation needs it
unsharded, like a parameter.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.collectives import propagate
from zerojax.collectives.shard import HostStack, Shard
from zerojax.graph.analysis import Analysis
from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.primitives import ELEMENTWISE, LABELS, LINEAR, PRODUCTS, REDUCTIONS, SLICES
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import SMALL, is_small
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr

_SAME_SIZE = ELEMENTWISE | LABELS | propagate.FORWARD.keys()
_MOVES = LABELS | propagate.FORWARD.keys() | LINEAR | {"add_any"}

NEEDED: Analysis[bool] = Analysis(False, operator.or_, lambda eqn, _: [True] * len(eqn.invars))
"""Backward analysis of whether an equation needs a value unsharded, in any layout and scale."""


@NEEDED.rule("while", "shard_map")
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    return [True] * len(eqn.invars)


@NEEDED.rule(*REDUCTIONS)
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    return [False] * len(eqn.invars)


@NEEDED.rule("dot_general")
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    return [not propagate.adds_up(eqn)] * len(eqn.invars)


@NEEDED.rule("gather")
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    """A lookup needs its indices unsharded, and only rows of the table."""
    return [False, *(True for _ in eqn.invars[1:])]


@NEEDED.rule(*SLICES)
def _(eqn: Equation, results: Sequence[bool]) -> list[bool]:
    """An array is needed unsharded if its slice is."""
    return [results[0], *(True for _ in eqn.invars[1:])]


@NEEDED.rule(*_SAME_SIZE)
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


class ReusedGradients:
    """The gradients from which a jaxpr computes further values, and which are sharded for that.

    Args:
      jaxpr: An open jaxpr.
      args: Its arguments, some of them a :class:`Shard`.
      axis: The shard axis.
      small: The most elements of a parameter that is gathered with others.

    Attributes:
      gradients: By variable the spec of its shard, for the gradients that have the shape of a
        sharded parameter. They affect only placement: a value that is mistaken for a gradient keeps
        its numbers.
      used_unsharded: By ``id``, the shards among ``args`` that a use other than a lookup needs
        unsharded.
    """

    def __init__(self, jaxpr: Jaxpr, args: Sequence[object], axis: str, small: int = SMALL) -> None:
        self._needed, self._axis, self._small = used_unsharded(jaxpr), axis, small
        params = {v: x for v, x in zip(jaxpr.invars, args, strict=True) if isinstance(x, Shard)}
        self.used_unsharded: set[int] = {id(x) for v, x in params.items() if v in self._needed}
        specs: dict[tuple[int, ...], set[Spec]] = {}
        for v, x in params.items():
            if not is_small(v.aval.shape, x.spec, axis, small):
                specs.setdefault(v.aval.shape, set()).add(x.spec)
        only = {shape: choices.pop() for shape, choices in specs.items() if len(choices) == 1}
        likely = {v for v in self._needed - params.keys() if v.aval.shape in only}
        argument_origins = [Origin.WEIGHT if v in params else _NOTHING for v in jaxpr.invars]
        origins = ORIGINS.forward(jaxpr, argument_origins).of if likely else {}
        self.gradients: dict[Atom, Spec] = {
            v: only[v.aval.shape] for v, x in origins.items() if Origin.SUM in x and v in likely
        }

    def as_shard(self, v: Atom, value: Any, wants: Mapping[Atom, Spec]) -> object:
        """Returns the value of a variable, as a shard if it is a gradient that a use needs
        unsharded."""
        if v not in self._needed or v not in wants or isinstance(value, Shard | HostStack):
            return value
        spec = wants[v]
        if is_small(v.aval.shape, spec, self._axis, self._small):
            return value
        if not layout.dimensions(spec, self._axis):
            return value
        return Shard(value, spec)


class Origin(enum.IntFlag):
    """The origin of a value."""

    WEIGHT = enum.auto()
    """A parameter, element by element."""
    SUM = enum.auto()
    """A product, a convolution or a sum of rows in a backward pass, of operands that are not
    parameters; also in another layout or dtype."""


_NOTHING = Origin(0)


def _origins(*, transposed: bool) -> Analysis[Origin]:
    """Returns the analysis of a program, of a backward pass if ``transposed``."""
    analysis = Analysis(
        _NOTHING, operator.or_, lambda eqn, _: [_NOTHING] * len(eqn.outvars), control=False
    )

    @analysis.rule(*_SAME_SIZE)
    def _(eqn: Equation, operands: Sequence[Origin]) -> list[Origin]:
        size, origin = _size(eqn.outvars[0]), _NOTHING
        pairs = list(zip(eqn.invars, operands, strict=True))
        if any(Origin.WEIGHT in x and _size(v) == size for v, x in pairs):
            origin |= Origin.WEIGHT
        sums = [Origin.SUM in x for v, x in pairs if not isinstance(v, core.Literal)]
        if eqn.primitive.name in _MOVES and sums and all(sums):
            origin |= Origin.SUM
        return [origin]

    @analysis.rule(*PRODUCTS, "scatter-add")
    def _(eqn: Equation, operands: Sequence[Origin]) -> list[Origin]:
        is_backward = transposed or jaxprs.is_transposed(eqn)
        is_sum = is_backward and _adds_rows(eqn) and not any(Origin.WEIGHT in x for x in operands)
        return [Origin.SUM if is_sum else _NOTHING]

    @analysis.rule("while", "shard_map")
    def _(eqn: Equation, operands: Sequence[Origin]) -> list[Origin]:
        return [_NOTHING] * len(eqn.outvars)

    @analysis.rule("scan", "cond", *(primitive.name for primitive in jaxprs.CALLS))
    def _(eqn: Equation, operands: Sequence[Origin]) -> list[Origin]:
        inner = ORIGINS_BACKWARD if transposed or jaxprs.is_transposed(eqn) else ORIGINS
        weights = [x & Origin.WEIGHT for x in operands]
        return [x & Origin.SUM for x in inner.through(eqn, weights)]

    return analysis


ORIGINS, ORIGINS_BACKWARD = _origins(transposed=False), _origins(transposed=True)


def _adds_rows(eqn: Equation) -> bool:
    if eqn.primitive is prims.scatter_add_p:
        return bool(jaxprs.param(eqn, "dimension_numbers").update_window_dims)
    return eqn.primitive.name in PRODUCTS


def _size(v: Atom) -> int:
    """Returns the number of elements of a variable; ``aval.size`` takes several times as long."""
    return math.prod(v.aval.shape)
