"""A parameter that is still sharded, and a gradient that is reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.plan.layout import Spec


@dataclass(frozen=True, eq=False)
class MovedStack:
    """A gathered stack of layers, of which another dimension comes first.

    Attributes:
      value: [d, L, ...], where the stack is [L, ..., d, ...].
      dimension: That of the stack which comes first in ``value``.
    """

    value: jax.Array
    dimension: int

    def layer(self, index: jax.Array) -> jax.Array:
        """One layer [..., d, ...]."""
        layer = lax.dynamic_index_in_dim(self.value, index, axis=1, keepdims=False)
        return jnp.moveaxis(layer, 0, self.dimension - 1)


@dataclass(frozen=True, eq=False)
class FilledStack(MovedStack):
    """The same of a stack that a loop has gathered one layer ahead.

    Attributes:
      value: [L, d, ...]; entry i is layer i + ``ahead``, modulo L.
      ahead: 1, or -1 where the loop ran in reverse.
    """

    ahead: int

    def layer(self, index: jax.Array) -> jax.Array:
        at = (index - self.ahead) % self.value.shape[0]
        layer = lax.dynamic_index_in_dim(self.value, at, keepdims=False)
        return jnp.moveaxis(layer, 0, self.dimension - 1)

    @property
    def whole(self) -> jax.Array:
        """The stack in its own order."""
        return jnp.moveaxis(jnp.roll(self.value, self.ahead, 0), 1, self.dimension)


@dataclass(frozen=True, eq=False)
class Shard:
    """A parameter, or a value of its shape made from it, in the body.

    ``spec`` has one entry a dimension and names the shard axis in one of them. ``whole`` is
    the value gathered in advance (stages 1 and 2; at stage 3 what stays gathered), None where it is
    gathered at each use.
    ``narrow`` is what it was cast from, or computed from element by element, in a smaller dtype, in
    which it is gathered.
    ``rounded`` is the value cast to a smaller dtype, in which the body needs it whole, and gathered
    in advance; see :mod:`zerojax.collectives.rounding`. In a loop both may be gathered an iteration
    ahead, see :mod:`zerojax.collectives.ahead`. ``moved`` is what was gathered in advance as a loop
    reads it, see :mod:`zerojax.collectives.moved_stacks`. One that ``fills`` is a stack that the
    first loop over it gathers layer by layer, and keeps, see :mod:`zerojax.collectives.filled`. One
    that is ``quantized`` is gathered in blocks of a few bits.

    One in host memory (``host``) comes to the device where it is used; its spec may be without
    the shard axis. A gradient there brings its ``sums`` along, see
    :func:`zerojax.optim.norm.square_sums`.
    """

    value: jax.Array
    spec: Spec
    whole: jax.Array | None = None
    host: bool = False
    sums: jax.Array | None = None
    narrow: Narrow | None = None
    rounded: jax.Array | None = None
    moved: MovedStack | None = None
    fills: bool = False
    quantized: bool = False


class Narrow(NamedTuple):
    """A shard in a smaller dtype, from which another one is computed element by element.

    Attributes:
      shard: What is gathered in place of the other one.
      widen: Computes the other one, from ``shard.value`` or from the same gathered.
      equations: How many equations do so; 1 for a cast.
    """

    shard: Shard
    widen: Callable[[jax.Array], jax.Array]
    equations: int = 1

    @property
    def is_cast(self) -> bool:
        """Whether it is one cast: more keeps no layer apart from the others, or from scales."""
        return self.equations == 1

    @classmethod
    def cast(cls, shard: Shard, dtype: Any) -> Narrow:
        """The shard from which another one is cast to ``dtype``."""
        return cls(shard, lambda x: x.astype(dtype))


@dataclass(frozen=True, eq=False)
class HostStack:
    """A stack of activations in host memory until the backward pass needs its entries.

    XLA has chosen its sharding, so that it has no spec.
    """

    value: jax.Array


class ReducedGradient(NamedTuple):
    """A gradient, reduced over the devices, and its spec."""

    value: jax.Array
    spec: Spec
