"""A gradient as the devices' parts of it, to be summed later.

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
        """Of the parts."""
        shape, at = list(self.eqn.outvars[0].aval.shape), self.at(gatherer.axis)
        return gatherer.mesh.size, shape.pop(at), *shape

    def parts(self, values: Sequence[jax.Array], gatherer: Gatherer) -> Parts:
        """Each device's sum over its own rows."""
        n, apart = gatherer.mesh.size, []
        for x, at in zip(values, self.rows, strict=True):
            x = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
            axes = batch_axes(gatherer.mesh)
            apart.append(gatherer.constrain(x, [axes if d == at else None for d in range(x.ndim)]))
        made = self._multiplied(*apart) if len(apart) == 2 else self._added(*apart)
        return Parts(pinned(jnp.moveaxis(made, 1 + self.at(gatherer.axis), 1), gatherer), self)

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
        made = lax.reduce(x, jnp.zeros((), x.dtype), lax.add, axes)
        return jnp.moveaxis(made, at - sum(d < at for d in axes), 0)


def pinned(parts: jax.Array, gatherer: Gatherer) -> jax.Array:
    """Parts [devices, ...], each on its device."""
    return gatherer.constrain(parts, (batch_axes(gatherer.mesh), *(None,) * (parts.ndim - 1)))


def total(parts: Parts, gatherer: Gatherer) -> jax.Array:
    """The gradient, as its shard: summed and cut within each replica group, and then summed over
    the groups."""
    axis, axes = gatherer.axis, list(batch_axes(gatherer.mesh))
    x = parts.value.reshape(*(gatherer.mesh.shape[name] for name in axes), *parts.value.shape[1:])
    for name in sorted(axes, key=lambda name: name != axis):
        x = lax.reduce(x, jnp.zeros((), x.dtype), lax.add, (axes.index(name),))
        axes.remove(name)
        rest = (None,) * (x.ndim - len(axes) - 1)
        if name == axis:
            x = gatherer.constrain(x, (*axes, None, *rest))
        x = gatherer.constrain(x, (*axes, axis, *rest))
    at = parts.product.at(axis)
    x = gatherer.constrain(jnp.moveaxis(x, 0, at), parts.product.spec)
    for eqn in parts.links:
        (x,) = jaxprs.bind(eqn, [x])
    return x


def links(eqn: Any) -> bool:
    """Whether an equation moves the elements of one operand, or rounds them."""
    return eqn.primitive.name in _SAME_SHAPE or propagate.undone(eqn)
