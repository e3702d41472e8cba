"""Gradients as the devices' partial sums, to be added up later.

Each device has summed over its own rows of the batch, and its own tokens of them. The sum over the
devices is a reduce-scatter, which can overlap with other work when it runs later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, PartitionSpec

from zerojax.collectives import propagate, sharded_products
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.reduction import (
    add_up,
    axes_of,
    cut_evenly,
    pin_to_devices,
    reduce_partial_sums,
)
from zerojax.devices.mesh import batch_devices, sequence_size
from zerojax.graph.contractions import RESULT, Contraction
from zerojax.graph.primitives import LABELS, LINEAR
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation

_SAME_SHAPE = LABELS | LINEAR


@dataclass(frozen=True, eq=False)
class PartialSum:
    """A gradient that is not summed over the devices yet.

    Attributes:
      value: [devices, *shape], each device's partial sum on that device. The dimension that the
        shard axis will split comes first in ``shape``: a copy in that order is free now, not later.
      row_sum: The sum that produces them.
      links: The equations, of one operand each, that compute the gradient from the sum.
    """

    value: jax.Array
    row_sum: RowSum
    links: tuple[Equation, ...] = ()

    def then(self, eqn: Equation) -> PartialSum:
        """Returns the partial sum of the equation's result, by deferring the equation."""
        return replace(self, links=(*self.links, eqn))

    def plus(self, other: PartialSum, gatherer: Gatherer) -> PartialSum:
        """Returns the sum with partial sums of the same form, see :attr:`RowSum.form`."""
        return replace(self, value=pin_to_devices(self.value + other.value, gatherer))


class RowSum(NamedTuple):
    """A sum over the rows of a batch, and over tokens, whose result is a gradient.

    Attributes:
      eqn: The product, the convolution, or the reduce_sum.
      cuts: The dimension of rows of each operand; then the dimension of tokens of each operand, if
        devices share the tokens of a row.
      spec: The spec of the sum's shard.
      links: The equations that compute the loop's result from the sum.
    """

    eqn: Equation
    cuts: tuple[tuple[int, ...], ...]
    spec: Spec
    links: tuple[Equation, ...]

    def at(self, axis: str) -> int:
        """Returns the dimension that the axis splits."""
        return layout.dimensions(self.spec, axis)[0]

    def shape(self, gatherer: Gatherer) -> tuple[int, ...]:
        """Returns the shape of the partial sums."""
        shape, at = list(self.eqn.outvars[0].aval.shape), self.at(gatherer.axis)
        return gatherer.mesh.size, shape.pop(at), *shape

    @property
    def form(self) -> tuple[object, ...]:
        """Returns what is equal for sums whose partial sums may be added up."""
        aval = self.eqn.outvars[0].aval
        links = [(link.primitive.name, str(link.params)) for link in self.links]
        return self.spec, aval.shape, aval.dtype, *links

    def partial(self, values: Sequence[jax.Array], gatherer: Gatherer) -> PartialSum:
        """Computes each device's sum over its own rows and tokens."""
        if self.eqn.primitive is prims.conv_general_dilated_p:
            value = self._convolved(values, gatherer)
        else:
            split = [self._split_by_device(x, i, gatherer) for i, x in enumerate(values)]
            value = self._multiplied(*split) if len(split) == 2 else self._added(*split)
            # Batch dimensions come first in a product's result, and in that of a sum by _added.
            value = value.reshape(gatherer.mesh.size, *value.shape[len(self.cuts) :])
        value = jnp.moveaxis(value, 1 + self.at(gatherer.axis), 1)
        return PartialSum(pin_to_devices(value, gatherer), self)

    def _convolved(self, values: Sequence[jax.Array], gatherer: Gatherer) -> jax.Array:
        """Computes the partial sums [devices, ...] of a convolution with ``shard_map``."""
        (axes,), (rows,) = axes_of(gatherer), self.cuts
        specs = tuple(PartitionSpec(*(None,) * at, axes) for at in rows)
        # With a dimension of devices XLA would build one convolution of many groups, and for groups
        # of one row a wrong one.
        return jax.shard_map(
            lambda *own: jaxprs.bind(self.eqn, own)[0][None],
            mesh=gatherer.mesh,
            in_specs=specs,
            out_specs=PartitionSpec(axes),
            check_vma=False,
        )(*values)

    def _split_by_device(self, x: jax.Array, i: int, gatherer: Gatherer) -> jax.Array:
        """Splits each sharded dimension of operand ``i`` into two: the devices, and each device's
        own elements."""
        entries: list[SpecEntry] = [None] * x.ndim
        cuts = zip((dims[i] for dims in self.cuts), axes_of(gatherer), strict=True)
        for at, axes in sorted(cuts, reverse=True):
            n = math.prod(gatherer.mesh.shape[name] for name in axes)
            x = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
            entries.insert(at, axes)
        return gatherer.constrain(x, entries)

    def _own(self, i: int, dims: Sequence[int]) -> list[int]:
        """Maps dimensions of operand ``i`` to those after the split, a sharded one to each device's
        own elements."""
        return [d + sum(cut[i] <= d for cut in self.cuts) for d in dims]

    def _devices(self, i: int) -> list[int]:
        """Returns the dimensions of devices after the split, in the order of ``cuts``."""
        return [d - 1 for d in self._own(i, [cut[i] for cut in self.cuts])]

    def _multiplied(self, one: jax.Array, other: jax.Array) -> jax.Array:
        product = Contraction.of(self.eqn)
        left, right = (self._own(i, dims) for i, dims in enumerate(product.contracted))
        params = product.params((left, right), (self._devices(0), self._devices(1)))
        (result,) = jaxprs.bind(self.eqn, (one, other), params)
        return result

    def _added(self, x: jax.Array) -> jax.Array:
        summed = self._own(0, jaxprs.param(self.eqn, "axes"))
        device_dims = [at - sum(d < at for d in summed) for at in self._devices(0)]
        return jnp.moveaxis(add_up(x, *summed), device_dims, range(len(device_dims)))


def total(partial: PartialSum, gatherer: Gatherer) -> jax.Array:
    """Reduces partial sums to the gradient's shard."""
    row_sum, ledger = partial.row_sum, gatherer.ledger
    with ledger.within(row_sum.eqn), ledger.of(row_sum.spec):
        x = reduce_partial_sums(partial.value, row_sum.spec, gatherer)
    for link in partial.links:
        (x,) = jaxprs.bind(link, [x])
    return x


def links(eqn: Equation) -> bool:
    """Returns whether an equation moves, negates or rounds the elements of one operand."""
    return eqn.primitive.name in _SAME_SHAPE or propagate.reversible(eqn)


def row_sum_of(
    eqn: Equation,
    rows: RowDimensions,
    spec: Spec,
    gatherer: Gatherer,
    after: tuple[Equation, ...] = (),
) -> RowSum | None:
    """Returns an equation as a sum over a batch's rows; None if its dimension of rows is unknown,
    or if ``spec`` does not split the sum evenly over all devices.

    Args:
      eqn: The equation.
      rows: The dimensions along which rows of the batch lie.
      spec: The spec of the sum's shard.
      after: The equations that compute a gradient from the sum.
    """
    shape = eqn.outvars[0].aval.shape
    # For an unsharded sum, deferring or quantizing the reduction costs as much as it saves.
    if not gatherer.sums_own_rows or cut_evenly(shape, spec, gatherer) is None:
        return None
    if sharded_products.find_product(eqn, RESULT, spec, gatherer, rows) is not None:
        return None
    cuts = _cuts_of(eqn, rows, gatherer.mesh)
    return None if cuts is None else RowSum(eqn, cuts, spec, after)


def _cuts_of(eqn: Equation, rows: RowDimensions, mesh: Mesh) -> tuple[tuple[int, ...], ...] | None:
    """Returns the dimensions of rows of the operands, over which the equation sums; then those of
    tokens, if devices share the tokens of a row."""
    summed: list[tuple[int, ...]] = []
    shared = sequence_size(mesh)
    if eqn.primitive is prims.reduce_sum_p:
        summed = [(d,) for d in jaxprs.param(eqn, "axes")]
    elif (product := Contraction.of(eqn)) is not None:
        # With automatic mesh axes the output sharding of a product names no axis.
        out_spec = getattr(jaxprs.param(eqn, "out_sharding", None), "spec", ())
        if not any(product.batched) and not any(out_spec):
            summed = list(zip(*product.contracted, strict=True))
    elif eqn.primitive is prims.conv_general_dilated_p:
        # In a kernel's gradient the batch takes the place of the input features.
        numbers = jaxprs.param(eqn, "dimension_numbers")
        groups = [jaxprs.param(eqn, f"{kind}_group_count") for kind in ("feature", "batch")]
        if groups == [1, 1] and shared == 1:
            summed = [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
    sizes = {dims: eqn.invars[0].aval.shape[dims[0]] for dims in summed}
    known = [rows.dims(v) for v in eqn.invars]
    of_rows = [
        dims
        for dims, size in sizes.items()
        if size % batch_devices(mesh) == 0
        and any(d in each for d, each in zip(dims, known, strict=True))
    ]
    if not of_rows or shared == 1:
        return (of_rows[0],) if of_rows else None
    tokens = [dims for dims in summed if dims != of_rows[0] and sizes[dims] % shared == 0]
    return (of_rows[0], tokens[0]) if len(tokens) == 1 else None
