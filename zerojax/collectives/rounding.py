"""Parameters that a step rounds before it needs them whole, gathered once in the narrower dtype.

flax casts a module's float32 parameters to its ``dtype`` where they are used: in each micro-batch,
and in a loop over layers in each iteration. At stages 1 and 2 parameters are gathered once a step,
and so are at stage 3 those that stay gathered. Gathered as they are, these would be sent and held
in float32; gathered behind their casts, once for each micro-batch. So the cast is done in advance,
and its result gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import many, propagate, wanted
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.shard import HostStack, Shard
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.trace.elementwise import ELEMENTWISE, LABELS, REDUCTIONS
from zerojax.xla import jaxprs

CAST = "convert_element_type"
_ON_SHARDS = REDUCTIONS | {"shard_map"}
_Dtypes = frozenset[Any]
_NONE: _Dtypes = frozenset()

# From the position of a result and its spec to the dtypes in which what follows needs it whole.
_Beyond = Callable[[int, Spec], _Dtypes]


def is_rounded(value: Any) -> bool:
    """Whether ``value`` is a shard that has been gathered in a narrower dtype."""
    return isinstance(value, Shard) and value.rounded is not None


def round_in_advance(closed: Any, args: Sequence[Any], gatherer: Gatherer) -> list[Any]:
    """``args`` of a jaxpr with those shards gathered rounded that are needed whole only so.

    Those that are not gathered in advance are left as they are, and small ones.
    """
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    uses = _Uses(gatherer.mesh, gatherer.axis)
    entered = []
    for v, x in zip(jaxpr.invars, args, strict=True):
        if _is_large(x, gatherer.axis):
            dtype = uses.rounding(jaxpr, v, x.spec)
            if dtype is not None:
                whole = gatherer.whole(x.value.astype(dtype), x.spec)
                x = dataclasses.replace(x, whole=None, rounded=whole)
        entered.append(x)
    return entered


def _is_large(x: Any, axis: str) -> bool:
    return isinstance(x, Shard) and x.whole is not None and not many.is_whole(x, axis)


class Gathered(NamedTuple):
    """What is known whole of the result of an equation, as in :class:`Shard`."""

    whole: jax.Array | None
    rounded: jax.Array | None


def follow(eqn: Any, values: Sequence[Any], axis: str) -> Gathered:
    """What is known whole of the result of an equation on shards and numbers.

    A cast, or a change of layout, of what has been gathered is done once more on the whole; so is
    all work on small parameters. Other work is not: what it makes is gathered, and its operands
    need not be.
    """
    shard, name = values[0], eqn.primitive.name
    if name == CAST and is_rounded(shard) and shard.rounded.dtype == eqn.outvars[0].aval.dtype:
        return Gathered(shard.rounded, None)
    small = all(many.is_whole(v, axis) or _is_number(v) for v in values)
    whole = rounded = None
    if small or ((moves(name) or name == CAST) and shard.whole is not None):
        (whole,) = jaxprs.bind(eqn, [v.whole if isinstance(v, Shard) else v for v in values])
    if moves(name) and shard.rounded is not None:
        (rounded,) = jaxprs.bind(eqn, [shard.rounded])
    return Gathered(whole, rounded)


def moves(name: str) -> bool:
    """Whether a primitive has one operand, whose elements it leaves as they are."""
    return name in propagate.FORWARD or name in LABELS


def _is_number(value: Any) -> bool:
    return not isinstance(value, Shard | HostStack) and not jnp.ndim(value)


class _Users(NamedTuple):
    """The equations that take a variable, and where; its positions among a jaxpr's results."""

    eqns: list[tuple[Any, int]]
    results: list[int]


class _Uses:
    """In which dtypes a jaxpr needs a parameter whole, as :class:`Inserter` runs it."""

    def __init__(self, mesh: Mesh, axis: str) -> None:
        self._mesh, self._axis = mesh, axis
        self._users: dict[Any, dict[Any, _Users]] = {}

    def rounding(self, jaxpr: Any, v: Any, spec: Spec) -> Any:
        """The one dtype, narrower than its own, in which all of an open jaxpr needs its argument
        ``v`` whole; None without one."""
        dtypes = self._dtypes(jaxpr, v, spec, lambda at, spec: _NONE)
        return next(iter(dtypes)) if len(dtypes) == 1 and v.aval.dtype not in dtypes else None

    def _of(self, jaxpr: Any, v: Any) -> _Users:
        if jaxpr not in self._users:
            users: dict[Any, _Users] = {}
            for eqn in jaxpr.eqns:
                for i, x in enumerate(eqn.invars):
                    if not isinstance(x, core.Literal):
                        users.setdefault(x, _Users([], [])).eqns.append((eqn, i))
            for i, x in enumerate(jaxpr.outvars):
                if not isinstance(x, core.Literal):
                    users.setdefault(x, _Users([], [])).results.append(i)
            self._users[jaxpr] = users
        return self._users[jaxpr].get(v, _Users([], []))

    def _dtypes(self, jaxpr: Any, v: Any, spec: Spec, beyond: _Beyond) -> _Dtypes:
        """In which dtypes a variable, or what is a cast or another layout of it, is needed whole.

        Args:
          jaxpr: an open jaxpr.
          beyond: what is needed of the jaxpr's results.
        """
        users = self._of(jaxpr, v)
        by_equations = [self._use(jaxpr, eqn, i, spec, beyond) for eqn, i in users.eqns]
        return _NONE.union(*by_equations, *(beyond(at, spec) for at in users.results))

    def _use(self, jaxpr: Any, eqn: Any, i: int, spec: Spec, beyond: _Beyond) -> _Dtypes:
        name, v = eqn.primitive.name, eqn.invars[i]
        own = frozenset([v.aval.dtype])

        def of_result(at: int, spec: Spec) -> _Dtypes:
            return self._dtypes(jaxpr, eqn.outvars[at], spec, beyond)

        if eqn.primitive in jaxprs.CALLS:
            (body,) = jaxprs.bodies(eqn)
            return self._dtypes(body, body.invars[i], spec, of_result)
        if eqn.primitive is prims.scan_p:
            return self._in_loop(eqn, i, spec, of_result)
        if name in _ON_SHARDS:
            return _NONE
        if name == "optimization_barrier":
            return of_result(i, spec)
        if eqn.primitive is prims.sharding_constraint_p:
            same = wanted.spec_of(eqn) == layout.without(spec, self._axis)
            return of_result(0, spec) if same else own
        if moves(name):
            moved = spec if name in LABELS else propagate.forward(eqn, spec, self._mesh)
            return own if moved is None else of_result(0, moved)
        if name == CAST:
            return _of_cast(v.aval.dtype, eqn.outvars[0].aval.dtype, of_result(0, spec))
        # What is made element by element is gathered itself.
        on_shards = name in ELEMENTWISE and eqn.outvars[0].aval.shape == v.aval.shape
        return _NONE if on_shards else own

    def _in_loop(self, eqn: Any, i: int, spec: Spec, of_result: _Beyond) -> _Dtypes:
        (body,), (consts, carry) = jaxprs.inner(eqn), jaxprs.scan_counts(eqn)
        own = frozenset([eqn.invars[i].aval.dtype])
        stacked = i >= consts + carry
        if consts <= i < consts + carry or (stacked and spec[0] is not None):
            return own

        def beyond(at: int, spec: Spec) -> _Dtypes:
            return of_result(at, (None, *spec)) if at >= carry else own

        return self._dtypes(body, body.invars[i], spec[1:] if stacked else spec, beyond)


def _of_cast(old: Any, new: Any, needed: _Dtypes) -> _Dtypes:
    """The dtypes in which the operand of a cast is needed whole, given those of the result."""
    if not needed:
        return _NONE
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
    return frozenset([new if floats and new.itemsize < old.itemsize else old])
