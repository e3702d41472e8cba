"""A gradient as the devices' partial sums, to be added up later.

Each device has summed over its own rows of the batch. The sum over the devices is a reduce-scatter,
which may run beside other work by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.collectives import propagate
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.devices.mesh import axis_size, batch_axes
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SubAxis
from zerojax.plan.quantized import Format, blocks_of
from zerojax.trace.elementwise import LABELS
from zerojax.xla import jaxprs

FeedBack = Callable[[jax.Array, Sequence[Any], Sequence[int]], jax.Array]
"""``(x, lies, block)``: what is sent in the place of ``x``, which lies as ``lies`` says."""

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
    """The gradient, as its shard."""
    row_sum = partial.row_sum
    x = summed(partial.value, row_sum.spec, gatherer)
    for eqn in partial.links:
        (x,) = jaxprs.bind(eqn, [x])
    return x


def summed(
    value: jax.Array, spec: Spec, gatherer: Gatherer, feed_back: FeedBack | None = None
) -> jax.Array:
    """The sum of partial sums, cut as ``spec`` says: added up and cut within each replica group,
    and then added up over the groups.

    A large matrix is sent quantized where gradients are so (qgZ), and its sum is made on arrival,
    in float32. Parts of the axis are summed over one after the other, the innermost first, so that
    least is sent between hosts.

    Args:
      value: [devices, *shape], each device's part on itself, the dimension that is cut in front.
      spec: Of the sum's shard.
      feed_back: Corrects what is sent quantized, each time that it is sent.
    """
    axis, mesh, axes = gatherer.axis, gatherer.mesh, batch_axes(gatherer.mesh)
    (at,), n = layout.dimensions(spec, axis), axis_size(mesh, axis)
    parts = [name for _, name in layout.parts_of(spec, axis)]  # the innermost first
    how = gatherer.sent.gradients
    block = blocks_of(value.shape[1:], n, how)
    pieces = [name for name in layout.axes(spec[at]) if layout.whole_axis(name) == axis]
    if block is not None and parts == [axis] and 1 < gatherer.near < n:
        far = n // gatherer.near
        pieces = [SubAxis(axis, 1, far).name, SubAxis(axis, far, gatherer.near).name]
        parts = pieces[::-1]
    devices = [p for name in axes for p in (reversed(parts) if name == axis else [name])]
    x = value.reshape(*(layout.parts(name, mesh) for name in devices), *value.shape[1:])
    if block is None or how is None:
        x = _scattered(x, devices, parts, gatherer)
    else:
        x = _exchanged(x, devices, parts, pieces, block, how.format, gatherer, feed_back)
    groups, rest = [name for name in axes if name != axis], (None,) * (value.ndim - 2)
    if groups:
        x = gatherer.constrain(add_up(x, *range(len(groups))), (tuple(pieces), *rest))
    return gatherer.constrain(jnp.moveaxis(x.astype(value.dtype), 0, at), spec)


def _scattered(
    x: jax.Array, devices: list[str], parts: Sequence[str], gatherer: Gatherer
) -> jax.Array:
    """Partial sums [*devices, *shape], added up over those of ``parts`` and cut by each of them."""
    cut: tuple[str, ...] = ()
    for name in parts:
        x = add_up(x, devices.index(name))
        devices = [each for each in devices if each != name]
        rest = (None,) * (x.ndim - len(devices) - 1)
        x = gatherer.constrain(x, (*devices, cut or None, *rest))
        cut = (*cut, name)
        x = gatherer.constrain(x, (*devices, cut, *rest))
    return x


def _exchanged(
    x: jax.Array,
    devices: list[str],
    parts: Sequence[str],
    pieces: Sequence[str],
    block: Sequence[int],
    form: Format,
    gatherer: Gatherer,
    feed_back: FeedBack | None = None,
) -> jax.Array:
    """The same, sent to those who have the piece, as codes and scales, and added up there.

    Args:
      x: [*devices, *shape], the dimension that is cut in front.
      devices: The parts of axes that x lies on.
      parts: Those that are summed over, one after the other.
      pieces: The same as they cut the dimension, the outermost first.
      block: The extent of a block in each dimension of a piece.
      form: Of the codes.
      feed_back: See :func:`summed`.
    """
    sizes, shape = [layout.parts(name, gatherer.mesh) for name in pieces], x.shape[len(devices) :]
    piece = shape[0] // math.prod(sizes), *shape[1:]
    x = x.reshape(*x.shape[: len(devices)], *sizes, *piece)
    lies: list[Any] = [*devices, *(None for _ in (*pieces, *piece))]
    for name in parts:
        source, to = lies.index(name), len(lies) - len(piece) - len(pieces) + pieces.index(name)
        if feed_back is not None:
            x = feed_back(x, lies, block)
        comes = list(lies)
        comes[source], comes[to] = None, name
        widths = [*(1 for _ in range(x.ndim - len(piece))), *block]
        codes = quantize(gatherer.constrain(x, lies), widths, form)
        sent = [gatherer.constrain(gatherer.constrain(y, lies), comes) for y in codes]
        x, lies = add_up(dequantize(*sent, form, jnp.float32), source), comes
        lies.pop(source)
        x = gatherer.constrain(x, lies)
    return x.reshape(*x.shape[: len(lies) - len(piece) - len(pieces)], *shape)


def add_up(x: jax.Array, *dimensions: int) -> jax.Array:
    """The sum over dimensions, in the dtype of ``x``."""
    return lax.reduce(x, jnp.zeros((), x.dtype), lax.add, dimensions)


def links(eqn: Any) -> bool:
    """Whether an equation moves the elements of one operand, or rounds them."""
    return eqn.primitive.name in _SAME_SHAPE or propagate.reversible(eqn)


def row_sum_of(
    eqn: Any, rows: int | None, spec: Spec, gatherer: Gatherer, after: tuple[Any, ...] = ()
) -> RowSum | None:
    """The sum over a batch's rows that an equation is; None where rows cannot be told, or where not
    every device could keep a piece of the sum.

    Args:
      eqn: The equation.
      rows: In a batch; None where unknown.
      spec: Of the sum's shard.
      after: The equations that give a gradient from the sum.
    """
    axis, cut = gatherer.axis, layout.dimensions(spec, gatherer.axis)
    if rows is None or not gatherer.alone or len(cut) != 1:
        return None  # one that stays whole costs what it would take to hide it
    n = axis_size(gatherer.mesh, axis)
    if layout.parts(spec[cut[0]], gatherer.mesh) != n or eqn.outvars[0].aval.shape[cut[0]] % n:
        return None
    at = _rows_of(eqn, rows)
    return None if at is None else RowSum(eqn, at, spec, after)


def _rows_of(eqn: Any, rows: int) -> tuple[int, ...] | None:
    """The dimensions of rows of the operands, over which the equation sums."""
    if eqn.primitive is prims.reduce_sum_p:
        summed = [(d,) for d in jaxprs.param(eqn, "axes")]
    elif eqn.primitive is prims.dot_general_p:
        contracted, batched = jaxprs.param(eqn, "dimension_numbers")
        # Under automatic axes the sharding of a product names nothing.
        placed = getattr(jaxprs.param(eqn, "out_sharding", None), "spec", ())
        if any(batched) or any(placed):
            return None
        summed = list(zip(*contracted, strict=True))
    else:
        return None
    sizes = {dims: eqn.invars[0].aval.shape[dims[0]] for dims in summed}
    exact = [dims for dims, size in sizes.items() if size == rows]
    several = [dims for dims, size in sizes.items() if size % rows == 0]
    found = exact if exact else several if len(several) == 1 else []
    return found[0] if found else None
