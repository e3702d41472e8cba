"""A gradient as the devices' partial sums, to be added up later.

Each device has summed over its own rows of the batch. The sum over the devices is a reduce-scatter,
which may run beside other work by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import propagate
from zerojax.collectives.gathering import Gatherer
from zerojax.devices.mesh import batch_axes
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
    """A sum over the rows of a batch, whose result is a gradient.

    Attributes:
      eqn: The dot_general, or the reduce_sum.
      rows: The dimension of rows of each operand.
      spec: Of the sum's shard.
      links: The equations that give the loop's result from it.
    """

    eqn: Any
    rows: tuple[int, ...]
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
        """Each device's sum over its own rows."""
        n, axes, apart = gatherer.mesh.size, batch_axes(gatherer.mesh), []
        for x, at in zip(values, self.rows, strict=True):
            x = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
            apart.append(gatherer.constrain(x, [axes if d == at else None for d in range(x.ndim)]))
        value = self._multiplied(*apart) if len(apart) == 2 else self._added(*apart)
        value = jnp.moveaxis(value, 1 + self.at(gatherer.axis), 1)
        return PartialSum(pinned(value, gatherer), self)

    def _multiplied(self, one: jax.Array, other: jax.Array) -> jax.Array:
        contracted, _ = jaxprs.param(self.eqn, "dimension_numbers")
        numbers = [
            tuple(d + (d >= at) for d in dims)
            for at, dims in zip(self.rows, contracted, strict=True)
        ]
        return lax.dot_general(
            one,
            other,
            ((numbers[0], numbers[1]), ((self.rows[0],), (self.rows[1],))),
            precision=jaxprs.param(self.eqn, "precision"),
            preferred_element_type=jaxprs.param(self.eqn, "preferred_element_type"),
        )

    def _added(self, x: jax.Array) -> jax.Array:
        (at,) = self.rows
        axes = [d + (d >= at) for d in jaxprs.param(self.eqn, "axes")]
        return jnp.moveaxis(add_up(x, *axes), at - sum(d < at for d in axes), 0)


def pinned(value: jax.Array, gatherer: Gatherer) -> jax.Array:
    """Partial sums [devices, ...], each on its device."""
    return gatherer.constrain(value, (batch_axes(gatherer.mesh), *(None,) * (value.ndim - 1)))


def total(partial: PartialSum, gatherer: Gatherer) -> jax.Array:
    """The gradient, as its shard: summed and cut within each replica group, and then summed over
    the groups."""
    axis, axes, value = gatherer.axis, batch_axes(gatherer.mesh), partial.value
    groups = [name for name in axes if name != axis]
    x = value.reshape(*(gatherer.mesh.shape[name] for name in axes), *value.shape[1:])
    x = add_up(x, axes.index(axis))
    rest = (None,) * (x.ndim - len(groups) - 1)
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
