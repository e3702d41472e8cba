"""A gradient as the devices' partial sums, to be added up later.

Each device has summed over its own rows of the batch, and its own tokens of them. The sum over the
devices is a reduce-scatter, which may run beside other work by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import propagate
from zerojax.collectives.gathering import Gatherer
from zerojax.devices.mesh import SEQUENCE, batch_axes, joined_axes, sequence_size
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.trace.elementwise import LABELS
from zerojax.xla import jaxprs

_SAME_SHAPE = LABELS | {"convert_element_type", "neg"}


@dataclass(frozen=True, eq=False)
class PartialSum:
    """A gradient that is not summed over the devices yet.

    Attributes:
      value: [devices, *shape], each device's part on itself, with the dimension that the shard axis
        is to cut in front of the others. A copy in that order costs nothing, a later one does.
      row_sum: What makes them.
      links: Equations of one operand that give the gradient from the sum.
    """

    value: jax.Array
    row_sum: RowSum
    links: tuple[Any, ...] = ()

    def then(self, eqn: Any) -> PartialSum:
        """What the equation makes of the gradient."""
        return replace(self, links=(*self.links, eqn))


class RowSum(NamedTuple):
    """A sum over the rows of a batch, and over tokens, whose result is a gradient.

    Attributes:
      eqn: The dot_general, or the reduce_sum.
      cuts: The dimension of rows of each operand; then that of tokens, where devices share those.
      spec: Of the sum's shard.
      links: The equations that give the loop's result from it.
    """

    eqn: Any
    cuts: tuple[tuple[int, ...], ...]
    spec: Spec
    links: tuple[Any, ...]

    def at(self, axis: str) -> int:
        """The dimension that the axis cuts."""
        return layout.dimensions(self.spec, axis)[0]

    def shape(self, gatherer: Gatherer) -> tuple[int, ...]:
        """Of the partial sums."""
        shape, at = list(self.eqn.outvars[0].aval.shape), self.at(gatherer.axis)
        return gatherer.mesh.size, shape.pop(at), *shape

    def partial(self, values: Sequence[jax.Array], gatherer: Gatherer) -> PartialSum:
        """Each device's sum over its own rows and tokens."""
        apart = [self._apart(x, i, gatherer) for i, x in enumerate(values)]
        value = self._multiplied(*apart) if len(apart) == 2 else self._added(*apart)
        value = value.reshape(gatherer.mesh.size, *value.shape[len(self.cuts) :])
        value = jnp.moveaxis(value, 1 + self.at(gatherer.axis), 1)
        return PartialSum(pinned(value, gatherer), self)

    def _apart(self, x: jax.Array, i: int, gatherer: Gatherer) -> jax.Array:
        """Operand ``i``, each dimension that is cut as two, the devices' and each device's own."""
        entries: list[Any] = [None] * x.ndim
        cuts = zip((dims[i] for dims in self.cuts), _axes(gatherer), strict=True)
        for at, axes in sorted(cuts, reverse=True):
            n = math.prod(gatherer.mesh.shape[name] for name in axes)
            x = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
            entries.insert(at, axes)
        return gatherer.constrain(x, entries)

    def _own(self, i: int, dims: Sequence[int]) -> list[int]:
        """Where dimensions of operand ``i`` are afterwards, each device's own of those cut."""
        return [d + sum(cut[i] <= d for cut in self.cuts) for d in dims]

    def _devices(self, i: int) -> list[int]:
        """Where the devices' dimensions are, in the order of the cuts."""
        return [d - 1 for d in self._own(i, [cut[i] for cut in self.cuts])]

    def _multiplied(self, one: jax.Array, other: jax.Array) -> jax.Array:
        contracted, _ = jaxprs.param(self.eqn, "dimension_numbers")
        numbers = [self._own(i, dims) for i, dims in enumerate(contracted)]
        return lax.dot_general(
            one,
            other,
            ((numbers[0], numbers[1]), (self._devices(0), self._devices(1))),
            precision=jaxprs.param(self.eqn, "precision"),
            preferred_element_type=jaxprs.param(self.eqn, "preferred_element_type"),
        )

    def _added(self, x: jax.Array) -> jax.Array:
        summed = self._own(0, jaxprs.param(self.eqn, "axes"))
        left = [at - sum(d < at for d in summed) for at in self._devices(0)]
        return jnp.moveaxis(add_up(x, *summed), left, range(len(left)))


def _axes(gatherer: Gatherer) -> list[tuple[str, ...]]:
    """The axes of the mesh that cut rows, and those that cut tokens, if any."""
    mesh = gatherer.mesh
    return [batch_axes(mesh), *([(SEQUENCE,)] if sequence_size(mesh) > 1 else [])]


def pinned(value: jax.Array, gatherer: Gatherer) -> jax.Array:
    """Partial sums [devices, ...], each on its device."""
    return gatherer.constrain(value, (sum(_axes(gatherer), ()), *(None,) * (value.ndim - 1)))


def total(partial: PartialSum, gatherer: Gatherer) -> jax.Array:
    """The gradient, as its shard: summed and cut within each replica group, and then summed over
    the groups."""
    axis, axes, value = gatherer.axis, sum(_axes(gatherer), ()), partial.value
    groups = [name for name in axes if name not in joined_axes(axis)]
    x = value.reshape(*(gatherer.mesh.shape[name] for name in axes), *value.shape[1:])
    x = add_up(x, *map(axes.index, joined_axes(axis)))
    rest = (None,) * (value.ndim - 2)
    x = gatherer.constrain(x, (*groups, None, *rest))
    x = gatherer.constrain(x, (*groups, axis, *rest))
    if groups:
        x = gatherer.constrain(add_up(x, 0), (axis, *rest))
    x = gatherer.constrain(jnp.moveaxis(x, 0, partial.row_sum.at(axis)), partial.row_sum.spec)
    for eqn in partial.links:
        (x,) = jaxprs.bind(eqn, [x])
    return x


def add_up(x: jax.Array, *dimensions: int) -> jax.Array:
    """The sum over dimensions, in the dtype of ``x``."""
    return lax.reduce(x, jnp.zeros((), x.dtype), lax.add, dimensions)


def links(eqn: Any) -> bool:
    """Whether an equation moves the elements of one operand, or rounds them."""
    return eqn.primitive.name in _SAME_SHAPE or propagate.reversible(eqn)
