"""Sharded parameters, and gradients that are reduced to shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.plan.layout import Spec
from zerojax.xla.types import Atom, Value


class Abstract(jax.ShapeDtypeStruct):
    """The shape and the dtype of an array, in the place of the array while decisions are taken, see
    :class:`zerojax.collectives.insert.Decider`."""

    @classmethod
    def of(cls, v: Atom) -> Value:
        """Returns the abstract array of a variable."""
        return cls(v.aval.shape, v.aval.dtype)

    def astype(self, dtype: np.dtype) -> Abstract:
        return Abstract(self.shape, dtype)

    def __mul__(self, scale: object) -> Abstract:
        return self

    def fetched(self) -> Abstract:
        return self

    def entry(self, index: object) -> Abstract:
        return Abstract(self.shape[1:], self.dtype)


@dataclass(frozen=True, eq=False)
class MovedStack:
    """A gathered stack of layers, stored with another dimension first.

    An all-gather concatenates the devices' shards, so that the dimension along which a parameter is
    sharded comes first in memory. A loop expects its layers one after another. In between XLA would
    transpose the full stack, and hold it twice. Instead a loop takes each layer from the stack in
    the layout of the all-gather, see :mod:`zerojax.collectives.scans`.

    Attributes:
      value: [d, L, ...] for a stack [L, ..., d, ...].
      dimension: The dimension of the stack that comes first in ``value``.
    """

    value: jax.Array
    dimension: int

    def layer(self, index: jax.Array | int) -> jax.Array:
        """Returns one layer [..., d, ...]."""
        layer = lax.dynamic_index_in_dim(self.value, index, axis=1, keepdims=False)
        return jnp.moveaxis(layer, 0, self.dimension - 1)


@dataclass(frozen=True, eq=False)
class FilledStack(MovedStack):
    """A gathered stack of layers that a loop has gathered one layer ahead.

    Attributes:
      value: [L, d, ...].
    """

    def layer(self, index: jax.Array | int) -> jax.Array:
        layer = lax.dynamic_index_in_dim(self.value, index, keepdims=False)
        return jnp.moveaxis(layer, 0, self.dimension - 1)

    @property
    def unsharded(self) -> jax.Array:
        """The stack [L, ..., d, ...]."""
        return jnp.moveaxis(self.value, 1, self.dimension)


def moved_stack(x: object) -> MovedStack | None:
    """Returns the unsharded copy of a stack in the layout in which a loop reads it; None if there
    is none, or if it was rounded."""
    if not isinstance(x, Shard) or x.gathered is None or x.is_rounded:
        return None
    return x.gathered.stack


class UnshardedCopy(NamedTuple):
    """An unsharded copy of a shard.

    Attributes:
      array: The copy, in the dtype of the shard or rounded to a narrower one, see
        :mod:`zerojax.collectives.gather_once`.
      stack: The array in the layout that a loop reads, see :class:`MovedStack`.
    """

    array: jax.Array
    stack: MovedStack | None = None


@dataclass(frozen=True, eq=False)
class Gathering:
    """The way in which uses of a shard gather it.

    Attributes:
      host: Whether the array is in host memory until it is used; the spec of such a shard may be
        without the shard axis.
      quantized: Whether the shard is sent quantized, in low-bit blocks.
      by_loop: Whether the first loop over the stack gathers it, layer by layer, and keeps the
        layers, see :mod:`zerojax.collectives.stacks`.
      narrow: The shard in a narrower dtype that is gathered in its place.
      scale: The scale of the fp8 codes as which the matrix is gathered and multiplied; None for
        other arrays.
      scales: Those of the layers of a stack, [layers].
    """

    host: bool = False
    quantized: bool = False
    by_loop: bool = False
    narrow: Narrow | None = None
    scale: jax.Array | None = None
    scales: jax.Array | None = None


@dataclass(frozen=True, eq=False)
class Shard:
    """A parameter, or a value of its shape computed from it, in the body.

    Attributes:
      value: The array, sharded by ``spec``.
      spec: One entry a dimension, one of which names the shard axis.
      gathered: The unsharded copy if one exists: gathered in advance (at stages 1 and 2, and at
        stage 3 if the parameter stays gathered), or by a loop one iteration ahead.
      gathering: How a use gathers it.
      master: The array of which ``value`` is a copy in the compute dtype, if there is one. A loop
        that gathers ahead rounds it layer by layer, so that XLA holds no rounded copy of a stack.
    """

    value: jax.Array
    spec: Spec
    gathered: UnshardedCopy | None = None
    gathering: Gathering = Gathering()
    master: jax.Array | None = None

    @property
    def unsharded(self) -> jax.Array | None:
        """The unsharded copy, if it exists in the shard's dtype; otherwise None."""
        return None if self.gathered is None or self.is_rounded else self.gathered.array

    @property
    def is_rounded(self) -> bool:
        """True if the unsharded copy has been rounded to a narrower dtype."""
        return self.gathered is not None and self.gathered.array.dtype != self.value.dtype

    @property
    def in_fp8(self) -> bool:
        """True if products multiply its fp8 codes, or those of the array that it is cast from."""
        narrow = self.gathering.narrow
        return self.gathering.scale is not None or (narrow is not None and narrow.shard.in_fp8)

    def uncoded(self) -> Shard:
        """Returns the shard with its elements to be sent, not fp8 codes of them."""
        return self.with_gathering(scale=None, scales=None) if self.in_fp8 else self

    def with_value(self, value: jax.Array, spec: Spec | None = None) -> Shard:
        """Returns a shard of another array with the same elements, which is on the devices and not
        gathered yet. It is sent as this shard is, and has this shard's spec unless ``spec`` is
        passed."""
        how = self.gathering
        gathering = Gathering(quantized=how.quantized, scale=how.scale, scales=how.scales)
        return Shard(value, self.spec if spec is None else spec, gathering=gathering)

    def with_copy(self, copy: jax.Array | None, stack: MovedStack | None = None) -> Shard:
        """Replaces the unsharded copy; None removes it."""
        return replace(self, gathered=None if copy is None else UnshardedCopy(copy, stack))

    def with_gathering(self, **fields: Any) -> Shard:
        """Replaces fields of ``gathering``."""
        return replace(self, gathering=replace(self.gathering, **fields))


@dataclass(frozen=True, eq=False)
class HostGradient(Shard):
    """A gradient in host memory.

    Attributes:
      sums: Its square sums, see :func:`zerojax.optim.norm.square_sums`.
    """

    sums: jax.Array | None = None


class Narrow(NamedTuple):
    """A shard in a narrower dtype, from which another shard is computed element by element.

    Attributes:
      shard: The shard that is gathered in place of the other one.
      widen: Function from ``shard.value``, sharded or gathered, to the other shard's array.
      equations: The number of equations in ``widen``; 1 for a cast.
    """

    shard: Shard
    widen: Callable[[jax.Array], jax.Array]
    equations: int = 1

    @property
    def is_cast(self) -> bool:
        """True for a single cast. A longer computation may combine layers with each other, or with
        scales, so that it cannot be done layer by layer."""
        return self.equations == 1

    @classmethod
    def cast(cls, shard: Shard, dtype: np.dtype) -> Narrow:
        """Returns the narrow form of a shard that is a cast of ``shard`` to ``dtype``."""
        return cls(shard, lambda x: x.astype(dtype))


@dataclass(frozen=True, eq=False)
class HostStack:
    """A stack of activations in host memory until the backward pass needs its entries.

    It has no spec: XLA chooses its sharding.
    """

    value: jax.Array


class ReducedGradient(NamedTuple):
    """A gradient, reduced over the devices, and its spec."""

    value: jax.Array
    spec: Spec
