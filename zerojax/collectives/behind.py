"""What a loop reduces one iteration behind: the gradients of its layers.

A loop over layers makes each layer's gradients at the end of an iteration, and a reduce-scatter
there would be waited for. So each device carries its own part of every sum into the next iteration,
and the parts are reduced while that one computes. One layer of gradients more is held; and one more
is reduced, since the first iteration has nothing to reduce yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.collectives import order, propagate
from zerojax.collectives.ahead import LEAST
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.shard import ReducedGradient
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.trace.elementwise import LABELS
from zerojax.xla import jaxprs

_SAME_SHAPE = LABELS | {"convert_element_type", "neg"}


@dataclass(frozen=True, eq=False)
class Parts:
    """A gradient that is not summed over the devices yet.

    Attributes:
      value: [devices, *shape], each device's part on itself, with the dimension that the shard axis
        is to cut in front of the others. A copy in that order costs nothing, a later one does.
      product: What makes them.
      links: Equations of one operand that give the gradient from the sum.
    """

    value: jax.Array
    product: Product
    links: tuple[Any, ...] = ()

    def then(self, eqn: Any) -> Parts:
        """What the equation makes of the gradient."""
        return replace(self, links=(*self.links, eqn))


class Product(NamedTuple):
    """A product over the rows of a batch, whose result is a gradient.

    Attributes:
      eqn: The dot_general.
      rows: The dimension of rows of either operand.
      spec: Of the sum's shard.
      links: The equations that give the loop's result from it.
    """

    eqn: Any
    rows: tuple[int, int]
    spec: Spec
    links: tuple[Any, ...]

    def at(self, axis: str) -> int:
        """The dimension that the axis cuts."""
        return layout.dimensions(self.spec, axis)[0]

    def shape(self, gatherer: Gatherer) -> tuple[int, ...]:
        """Of the parts."""
        shape, at = list(self.eqn.outvars[0].aval.shape), self.at(gatherer.axis)
        return gatherer.mesh.size, shape.pop(at), *shape

    def parts(self, values: Sequence[jax.Array], gatherer: Gatherer) -> Parts:
        """Each device's product of its own rows."""
        n, apart = gatherer.mesh.size, []
        for x, at in zip(values, self.rows, strict=True):
            x = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
            on = tuple(gatherer.axis if d == at else None for d in range(x.ndim))
            apart.append(gatherer.constrain(x, on))
        made = self._multiplied(apart)
        return Parts(pinned(jnp.moveaxis(made, 1 + self.at(gatherer.axis), 1), gatherer), self)

    def _multiplied(self, apart: Sequence[jax.Array]) -> jax.Array:
        contracted, _ = jaxprs.param(self.eqn, "dimension_numbers")
        numbers = [
            tuple(d + (d >= at) for d in dims)
            for at, dims in zip(self.rows, contracted, strict=True)
        ]
        one, other = apart
        return lax.dot_general(
            one,
            other,
            ((numbers[0], numbers[1]), ((self.rows[0],), (self.rows[1],))),
            precision=jaxprs.param(self.eqn, "precision"),
            preferred_element_type=jaxprs.param(self.eqn, "preferred_element_type"),
        )


def pinned(parts: jax.Array, gatherer: Gatherer) -> jax.Array:
    """Parts [devices, ...], each on its device."""
    return gatherer.constrain(parts, (gatherer.axis, *(None,) * (parts.ndim - 1)))


def total(parts: Parts, gatherer: Gatherer) -> jax.Array:
    """The gradient, as its shard."""
    at, axis = parts.product.at(gatherer.axis), gatherer.axis
    whole = lax.reduce(parts.value, jnp.zeros((), parts.value.dtype), lax.add, (0,))
    whole = gatherer.constrain(whole, (None,) * whole.ndim)
    shard = gatherer.constrain(whole, (axis, *(None,) * (whole.ndim - 1)))
    x = gatherer.constrain(jnp.moveaxis(shard, 0, at), parts.product.spec)
    for eqn in parts.links:
        (x,) = jaxprs.bind(eqn, [x])
    return x


def links(eqn: Any) -> bool:
    """Whether an equation moves the elements of one operand, or rounds them."""
    return eqn.primitive.name in _SAME_SHAPE or eqn.primitive.name in propagate.BACKWARD


class Behind:
    """The stacks of gradients that a loop makes, some of them one iteration behind.

    Args:
      eqn: The scan.
      want: For each stack that it makes, the spec of an entry's shard; None for no gradient.
      gatherer: Reduces gradients.
      rows: In a batch; None where nothing is to be reduced behind.
    """

    def __init__(
        self, eqn: Any, want: Sequence[Spec | None], gatherer: Gatherer, rows: int | None
    ) -> None:
        self._gatherer, self._length = gatherer, jaxprs.param(eqn, "length")
        self._reverse = jaxprs.param(eqn, "reverse")
        self._stacks = eqn.outvars[len(eqn.outvars) - len(want) :]
        self._want = want
        self._behind: dict[int, Product] = {}  # by position of the stack
        self._made: set[int] = set()  # those that were made so
        # Rows that are shared along their tokens have no part of a sum each.
        alone = gatherer.mesh.shape.get(gatherer.axis) == gatherer.mesh.size > 1
        if rows is None or not alone or self._length < LEAST:
            return
        body, _ = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))
        results = body.outvars[len(body.outvars) - len(want) :]
        search = _Search(gatherer, rows)
        for i, (v, spec) in enumerate(zip(results, want, strict=True)):
            found = None if spec is None else search.product(body, v, spec)
            if found is not None:
                self._behind[i] = found

    @property
    def products(self) -> dict[Any, Product]:
        """By variable, what makes the parts."""
        return {each.eqn.outvars[0]: each for each in self._behind.values()}

    def order(self) -> tuple[jax.Array, jax.Array] | None:
        """int [length] each, for each iteration the one that came before it, its own for the first,
        and its own. None where nothing is reduced behind."""
        own, step = jnp.arange(self._length), 1 if self._reverse else -1
        return (jnp.clip(own + step, 0, self._length - 1), own) if self._behind else None

    def first(self) -> list[tuple[jax.Array, jax.Array]]:
        """What the first iteration is given: parts that are zero, and empty stacks of shards."""
        found = []
        for i, product in self._behind.items():
            aval = self._stacks[i].aval
            shape, dtype = product.shape(self._gatherer), product.eqn.outvars[0].aval.dtype
            found.append(
                (pinned(jnp.zeros(shape, dtype), self._gatherer), jnp.zeros(aval.shape, aval.dtype))
            )
        return found

    def hold(
        self, given: list[tuple[jax.Array, jax.Array]], whole: jax.Array | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """What an iteration is given, the smallest parts not before ``whole``: XLA reduces all of a
        layer's together."""
        if whole is None or not given:
            return given
        at = min(range(len(given)), key=lambda i: given[i][0].size)
        (held,) = order.hold_largest([given[at][0]], whole)
        return [
            (pinned(held, self._gatherer), stack) if i == at else (parts, stack)
            for i, (parts, stack) in enumerate(given)
        ]

    def reduced(self, given: Sequence[tuple[jax.Array, jax.Array]]) -> list[ReducedGradient]:
        """The gradients of the iteration before."""
        return [
            ReducedGradient(total(Parts(parts, p, p.links), self._gatherer), self._want[i] or ())
            for (i, p), (parts, _) in zip(self._behind.items(), given, strict=True)
        ]

    def passed(
        self,
        given: Sequence[tuple[jax.Array, jax.Array]],
        reduced: Sequence[ReducedGradient],
        outs: Sequence[Any],
        at: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[list[tuple[jax.Array, jax.Array]], list[Any]]:
        """What an iteration passes on; and its results ``outs``, of which the stacks' come last,
        without what is behind."""
        passed, left, first = [], list(outs), len(outs) - len(self._stacks)
        for i, (parts, stack), before in zip(self._behind, given, reduced, strict=True):
            assert at is not None
            y, left[first + i] = left[first + i], None
            if isinstance(y, Parts):
                self._made.add(i)
                passed.append((y.value, _put(stack, before.value, at[0])))
            else:
                passed.append((parts, _put(stack, y, at[1])))
        return passed, [total(x, self._gatherer) if isinstance(x, Parts) else x for x in left]

    def finished(self, given: Sequence[tuple[jax.Array, jax.Array]]) -> dict[int, jax.Array]:
        """The stacks, by position, once the last iteration's parts are reduced."""
        last = 0 if self._reverse else self._length - 1
        reduced = self.reduced(given)
        return {
            i: _put(stack, x.value, last) if i in self._made else stack
            for i, (_, stack), x in zip(self._behind, given, reduced, strict=True)
        }


def _put(stack: jax.Array, entry: Any, at: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, entry, at, 0)


class _Search:
    """The search for what makes a gradient."""

    def __init__(self, gatherer: Gatherer, rows: int) -> None:
        self._gatherer, self._rows = gatherer, rows
        self._seen: dict[int, tuple[dict[Any, Any], Counter[Any]]] = {}

    def product(
        self, jaxpr: Any, v: Any, spec: Spec | None, after: tuple[Any, ...] = ()
    ) -> Product | None:
        """The product that makes ``v``, perhaps in calls, and is used for nothing else; None where
        none does, or where not every device could reduce a piece of its rows."""
        producers, uses = self._of(jaxpr)
        while spec is not None and uses[v] == 1 and (eqn := producers.get(v)) is not None:
            if eqn.primitive in jaxprs.CALLS:
                (inner,) = jaxprs.bodies(eqn)
                return self.product(inner, inner.outvars[eqn.outvars.index(v)], spec, after)
            if not links(eqn):
                return self._checked(eqn, spec, after)
            after = (eqn, *after)
            if eqn.primitive.name in propagate.BACKWARD:
                spec = propagate.backward(eqn, spec, self._gatherer.mesh)
            (v,) = eqn.invars
        return None

    def _of(self, jaxpr: Any) -> tuple[dict[Any, Any], Counter[Any]]:
        """What makes each variable of an open jaxpr, and how often it is used."""
        if id(jaxpr) not in self._seen:
            used = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
            made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
            self._seen[id(jaxpr)] = made, Counter(jaxprs.variables(used))
        return self._seen[id(jaxpr)]

    def _checked(self, eqn: Any, spec: Spec, after: tuple[Any, ...]) -> Product | None:
        """The product that an equation is, if rows can be told and each device can keep a piece."""
        if eqn.primitive is not prims.dot_general_p:
            return None
        contracted, batched = jaxprs.param(eqn, "dimension_numbers")
        shape, n = eqn.outvars[0].aval.shape, self._gatherer.mesh.size
        cut = layout.dimensions(spec, self._gatherer.axis)
        # Under automatic axes the sharding of a product names nothing.
        placed = getattr(jaxprs.param(eqn, "out_sharding", None), "spec", ())
        if any(batched) or any(placed) or len(cut) != 1:
            return None
        if spec[cut[0]] != self._gatherer.axis or shape[cut[0]] % n:
            return None
        sizes = {pair: eqn.invars[0].aval.shape[pair[0]] for pair in zip(*contracted, strict=True)}
        exact = [pair for pair, size in sizes.items() if size == self._rows]
        several = [pair for pair, size in sizes.items() if size % self._rows == 0]
        rows = exact if exact else several if len(several) == 1 else []
        return Product(eqn, rows[0], spec, after) if rows else None
