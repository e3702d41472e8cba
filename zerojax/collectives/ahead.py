"""What a loop has ready one iteration ahead: entries from host memory, and parameters whole.

A loop over layers takes its parameters as slices of stacks. An all-gather in the iteration that
uses its result would be waited for. So each iteration carries the parameters of its own layer
whole, and gathers those of the next layer while it computes. One layer more is held; and one more
is gathered, since the last iteration gathers its own again, which nobody uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.collectives import loops, order, propagate, residuals
from zerojax.collectives.gathering import Gatherer, is_sharded
from zerojax.collectives.host import entry, on_host
from zerojax.collectives.shard import HostStack, Shard
from zerojax.plan import layout
from zerojax.trace.elementwise import ELEMENTWISE, LABELS
from zerojax.xla import jaxprs

LEAST = 16
"""The fewest iterations of a loop that gathers ahead: with fewer, one gather more is too many."""

REDUCTIONS = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"]
)
"""Primitives that run on shards as well."""

_SAME_ELEMENTS = LABELS | propagate.FORWARD.keys() | {"convert_element_type", "neg"}
_NOT_FOLLOWED = REDUCTIONS | {"concatenate", "cond", "while"}

Dtype = jnp.dtype


class Ahead:
    """The stacks that a loop reads, some of them one iteration ahead.

    Args:
      eqn: The scan.
      xs: What it reads, stacked along the first dimension. A :class:`Shard` or :class:`HostStack`
        in host memory is fetched ahead.
      gatherer: Gathers parameters.
      gathers: Whether parameters on the devices are gathered ahead.
    """

    def __init__(self, eqn: Any, xs: Sequence[Any], gatherer: Gatherer, *, gathers: bool) -> None:
        self._xs, self._gatherer = xs, gatherer
        self._length, self._reverse = jaxprs.param(eqn, "length"), jaxprs.param(eqn, "reverse")
        self._holds = residuals.holds_block(eqn)
        self._dtypes: dict[int, Dtype] = {}  # by position, of what is gathered ahead
        if gathers and self._length >= LEAST:
            body, _ = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))
            entries = body.invars[len(body.invars) - len(xs) :]
            for i, (v, x) in enumerate(zip(entries, xs, strict=True)):
                dtype = gathered_dtype(body, v) if self._is_shard(x) and not x.host else None
                if dtype is not None:
                    self._dtypes[i] = dtype

    def order(self) -> jax.Array | None:
        """int [length], for each iteration the one that comes after it; its own for the last.
        None where nothing is read ahead."""
        if not any(map(on_host, self._xs)) and not self._dtypes:
            return None
        step = -1 if self._reverse else 1
        return jnp.clip(jnp.arange(self._length) + step, 0, self._length - 1)

    def read(self, index: Any) -> list[jax.Array]:
        """The entries at ``index``, on the device or whole, of the stacks that are read ahead."""
        fetched = [self._fetched(x, index) for x in self._xs if on_host(x)]
        gathered = (self._gathered(self._xs[i], d, index) for i, d in self._dtypes.items())
        return [*fetched, *gathered]

    def _fetched(self, x: Any, index: Any) -> jax.Array:
        value = entry(x.value, index)
        spec = None if isinstance(x, HostStack) else x.spec[1:]
        return value if spec is None else self._gatherer.constrain(value, spec)

    def _gathered(self, x: Shard, dtype: Dtype, index: Any) -> jax.Array:
        shard = lax.dynamic_index_in_dim(x.value, index, keepdims=False)
        shard = self._gatherer.constrain(shard, x.spec[1:])
        return self._gatherer.whole(shard.astype(dtype), x.spec[1:])

    def first(self) -> list[jax.Array]:
        """What the first iteration needs."""
        return self.read(self._length - 1 if self._reverse else 0)

    def rest(self) -> list[Any]:
        """What the loop itself reads: the stacks that are on the device."""
        return [x.value if isinstance(x, Shard) else x for x in self._xs if not on_host(x)]

    def operands(self, come: Sequence[jax.Array], rest: Sequence[Any]) -> list[Any]:
        """One iteration's entries of all stacks: what was read ahead, and what the loop reads."""
        fetched = sum(map(on_host, self._xs))
        came, whole, here = iter(come[:fetched]), iter(come[fetched:]), iter(rest)
        entries: list[Any] = []
        for i, x in enumerate(self._xs):
            value = next(came) if on_host(x) else next(here)
            if self._is_shard(x):
                early = self._pinned(next(whole), x.spec[1:]) if i in self._dtypes else None
                value = Shard(value, x.spec[1:], early=early)
            entries.append(value)
        return entries

    def hold(self, carry: list[Any], coming: Sequence[jax.Array]) -> list[Any]:
        """The carried values of an iteration, whose cotangents wait for what was read ahead where a
        rematerialised block runs again. XLA hides the gather behind the block's forward pass then;
        otherwise it would come after all reduce-scatters, with nothing left to hide it."""
        gathered = zip(self._dtypes, coming[len(coming) - len(self._dtypes) :], strict=True)
        axis = self._gatherer.axis
        whole = [x for i, x in gathered if not any(layout.without(self._xs[i].spec, axis))]
        return order.hold_largest(carry, whole[-1]) if self._holds and whole else carry

    def _pinned(self, whole: jax.Array, spec: layout.Spec) -> jax.Array:
        """Otherwise XLA may carry the shard and gather in the iteration that uses the result."""
        return self._gatherer.constrain(whole, layout.without(spec, self._gatherer.axis))

    def _is_shard(self, x: Any) -> bool:
        return isinstance(x, Shard) and is_sharded(x.spec, self._gatherer.axis)


def gathered_dtype(jaxpr: Any, v: Any) -> Dtype | None:
    """The dtype in which an open jaxpr needs its operand ``v`` whole, after casts; the narrowest
    where it needs several. None where it gathers nothing, or what it has computed from shards."""
    used = {use.dtype for use in _uses(jaxpr, v, v.aval.dtype) if use.out is None}
    return min(used, key=lambda dtype: dtype.itemsize, default=None)


def follow(eqn: Any, early: jax.Array | None) -> jax.Array | None:
    """The result of an equation on what was gathered ahead, in its dtype; None where the equation
    does more than cast or rearrange."""
    name = eqn.primitive.name
    if early is None or name not in _SAME_ELEMENTS:
        return None
    if name != "convert_element_type":
        (moved,) = jaxprs.bind(eqn, [early])
        return moved  # type: ignore[no-any-return]
    return early if early.dtype == eqn.outvars[0].aval.dtype else None


class _Use(NamedTuple):
    """A use of a value that a jaxpr may cast and rearrange before.

    Attributes:
      dtype: In which the value is gathered.
      out: Number of the result that the value is; None where it is needed whole.
    """

    dtype: Dtype
    out: int | None = None


def _uses(jaxpr: Any, v: Any, dtype: Dtype) -> Iterator[_Use]:
    for eqn in jaxpr.eqns:
        for i, operand in enumerate(eqn.invars):
            if operand is v:
                yield from _used_by(jaxpr, eqn, i, dtype)
    for i, out in enumerate(jaxpr.outvars):
        if out is v:
            yield _Use(dtype, i)


def _used_by(jaxpr: Any, eqn: Any, i: int, dtype: Dtype) -> Iterator[_Use]:
    """The uses of operand ``i`` of an equation."""
    name, aval = eqn.primitive.name, eqn.invars[i].aval
    if name in _NOT_FOLLOWED:
        return
    if name in _SAME_ELEMENTS and eqn.outvars[0].aval.size == aval.size:
        # What is cast to a wider floating dtype is gathered before.
        widens = loops.wider(eqn.outvars[0], eqn.invars[i])
        yield from _uses(jaxpr, eqn.outvars[0], dtype if widens else eqn.outvars[0].aval.dtype)
    elif name == "optimization_barrier":
        yield from _uses(jaxpr, eqn.outvars[i], dtype)
    elif eqn.primitive in jaxprs.CALLS:
        (body,) = jaxprs.bodies(eqn)
        for use in _uses(body, body.invars[i], dtype):
            yield from [use] if use.out is None else _uses(jaxpr, eqn.outvars[use.out], use.dtype)
    elif eqn.primitive is prims.scan_p:
        (body,), (consts, carry) = jaxprs.inner(eqn), jaxprs.scan_counts(eqn)
        if i < consts:
            yield from (use for use in _uses(body, body.invars[i], dtype) if use.out is None)
        elif i < consts + carry:
            yield _Use(dtype)
    elif name not in ELEMENTWISE or eqn.outvars[0].aval.shape != aval.shape:
        yield _Use(dtype)
