"""Gradients that the body goes on with, because another gradient is made of them.

The optimizer's gradients are reduce-scattered where they are made. So are those from which the
step makes another one: the vector of a Hessian-vector product, the gradient in a penalty, the way
to the worst point nearby. What is scattered goes on as a shard, is worked on element by element as
such, and is gathered where it is needed whole, like a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.collectives import propagate
from zerojax.collectives.shard import HostStack, Shard
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import is_small
from zerojax.trace import marks
from zerojax.trace.elementwise import ELEMENTWISE, LABELS, REDUCTIONS
from zerojax.xla import jaxprs

_SAME_SIZE = ELEMENTWISE | LABELS | propagate.FORWARD.keys()
_MOVES = LABELS | propagate.FORWARD.keys() | {"convert_element_type", "neg"}


class Known:
    """What was found of jaxprs that others run, by ``id``: a block is read once for each set of its
    results or arguments, not once for each program around it. The jaxprs are held, so that no other
    one takes an ``id``."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[Any, set[Any]]] = {}

    def of(self, find: Callable[[], set[Any]], jaxpr: Any, *question: Any) -> set[Any]:
        """The answer to a question about a jaxpr, found now or before."""
        key = (id(jaxpr), *question)
        if key not in self._found:
            self._found[key] = jaxpr, find()
        return self._found[key][1]


def used_whole(jaxpr: Any, outs: Collection[Any] = (), known: Known | None = None) -> set[Any]:
    """The variables of a jaxpr that an equation needs whole, in whatever layout and scale. Lookups
    are left out, and what the optimizer does with its gradients.

    Args:
      jaxpr: An open jaxpr.
      outs: Its results that are needed whole.
      known: What was found before.
    """
    known = Known() if known is None else known
    return known.of(lambda: _used_whole(jaxpr, outs, known), jaxpr, "whole", frozenset(outs))


def _used_whole(jaxpr: Any, outs: Collection[Any], known: Known) -> set[Any]:
    whole = set(outs)
    for eqn in reversed(jaxpr.eqns):
        if marks.is_mark(eqn, marks.GRADIENT):
            whole.difference_update(eqn.outvars)
            continue
        if eqn.primitive.name in REDUCTIONS:
            continue
        operands = jaxprs.variables(eqn.invars)
        if eqn.primitive.name in _SAME_SIZE:
            size = _size(eqn.outvars[0])
            alike = [v for v in operands if _size(v) == size]
            if not alike:
                whole.update(operands)  # a broadcast
            elif not whole.isdisjoint(eqn.outvars):
                whole.update(alike)
        elif inside := _inside(eqn):
            for body in inside:
                pairs = zip(body.outvars, eqn.outvars, strict=True)
                inner = used_whole(body, {v for v, o in pairs if o in whole}, known)
                skip = len(eqn.invars) - len(body.invars)  # the index of a choice
                pairs = zip(eqn.invars[skip:], body.invars, strict=True)
                whole.update(jaxprs.variables(v for v, x in pairs if x in inner))
        else:
            lookup = eqn.primitive is prims.gather_p
            whole.update(jaxprs.variables(eqn.invars[1:]) if lookup else operands)
    return whole


class GoesOn:
    """The gradients with which a jaxpr goes on, and which are cut for it.

    Args:
      jaxpr: An open jaxpr.
      args: What it is given, some of it :class:`Shard`.
      axis: The shard axis.
      known: What was found of jaxprs before.

    Attributes:
      gradients: By variable the spec of its shard, of those that have the shape of a sharded
        parameter. Only placement hangs on them: of what is taken for a gradient by mistake the
        numbers stay the same.
      used_whole: By ``id``, the shards among ``args`` that something else than lookups needs whole.
    """

    def __init__(
        self, jaxpr: Any, args: Sequence[Any], axis: str, known: Known | None = None
    ) -> None:
        known = Known() if known is None else known
        self._whole, self._axis = used_whole(jaxpr, known=known), axis
        params = {v: x for v, x in zip(jaxpr.invars, args, strict=True) if isinstance(x, Shard)}
        self.used_whole = {id(x) for v, x in params.items() if v in self._whole}
        specs: dict[tuple[int, ...], set[Spec]] = {}
        for v, x in params.items():
            if not is_small(v.aval.shape, x.spec, axis):
                specs.setdefault(v.aval.shape, set()).add(x.spec)
        only = {shape: some.pop() for shape, some in specs.items() if len(some) == 1}
        likely = {v for v in self._whole - params.keys() if v.aval.shape in only}
        sums = _sums(jaxpr, params, known, transposed=False) if likely else set()
        self.gradients = {v: only[v.aval.shape] for v in sums & likely}

    def as_shard(self, v: Any, value: Any, wants: Mapping[Any, Spec]) -> Any:
        """The value of a variable, as a shard where it is a gradient that is used whole."""
        if v not in self._whole or v not in wants or isinstance(value, Shard | HostStack):
            return value
        spec = wants[v]
        if is_small(v.aval.shape, spec, self._axis) or not layout.dimensions(spec, self._axis):
            return value
        return Shard(value, spec)


def _sums(jaxpr: Any, params: Collection[Any], known: Known, *, transposed: bool) -> set[Any]:
    """The variables that differentiation makes by a product, a convolution or a sum of rows, of
    operands that are no parameters; also in another layout or dtype."""
    question = "sums", frozenset(params), transposed
    return known.of(lambda: _find_sums(jaxpr, params, known, transposed), jaxpr, *question)


def _find_sums(jaxpr: Any, params: Collection[Any], known: Known, transposed: bool) -> set[Any]:
    weights: set[Any] = set(params)
    sums: set[Any] = set()
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, jaxprs.variables(eqn.invars)
        if name in _SAME_SIZE:
            size = _size(eqn.outvars[0])
            if any(v in weights and _size(v) == size for v in operands):
                weights.update(eqn.outvars)
            if operands and (name == "add_any" or name in _MOVES) and sums.issuperset(operands):
                sums.update(eqn.outvars)
        elif inside := _inside(eqn):
            for body in inside:
                skip = len(eqn.invars) - len(body.invars)
                pairs = zip(eqn.invars[skip:], body.invars, strict=True)
                given = {x for v, x in pairs if not isinstance(v, core.Literal) and v in weights}
                backward = transposed or jaxprs.is_transposed(eqn)
                inner = _sums(body, given, known, transposed=backward)
                results = zip(body.outvars, eqn.outvars, strict=True)
                made = ((v, o) for v, o in results if not isinstance(v, core.Literal))
                sums.update(o for v, o in made if v in inner)
        elif (
            _adds_rows(eqn)
            and weights.isdisjoint(operands)
            and (transposed or jaxprs.is_transposed(eqn))
        ):
            sums.update(eqn.outvars)
    return sums


def _adds_rows(eqn: Any) -> bool:
    if eqn.primitive is prims.scatter_add_p:
        return bool(jaxprs.param(eqn, "dimension_numbers").update_window_dims)
    return eqn.primitive in (prims.dot_general_p, prims.conv_general_dilated_p)


def _inside(eqn: Any) -> list[Any]:
    """The open jaxprs of a call, a choice or a loop over a known number of steps."""
    if eqn.primitive is prims.scan_p:
        return [jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))[0]]
    return jaxprs.bodies(eqn)


def _size(v: Any) -> int:
    """The elements of a variable; ``aval.size`` takes several times as long."""
    return math.prod(v.aval.shape)
