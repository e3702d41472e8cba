"""Parameters that come in from host memory where they are used, gradients that leave for it.

In a loop over layers a layer's parameters come in one iteration ahead, while the layer before is
at work, forward and backward (:mod:`zerojax.collectives.ahead`). A layer's gradients leave in the
iteration that makes them. What a rematerialised block there keeps
(:mod:`zerojax.collectives.residuals`) does both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.shard import HostStack, Shard


def on_host(v: Any) -> bool:
    """Whether a value of the body lies in host memory."""
    return isinstance(v, HostStack) or (isinstance(v, Shard) and v.gathering.host)


def sent(x: jax.Array) -> jax.Array:
    """An array on its way to host memory."""
    return jax.device_put(x, jax.memory.Space.Host)


@runtime_checkable
class Fetchable(Protocol):
    """A parameter that lies in no memory of the program's, but can be brought to the device."""

    def whole(self) -> jax.Array: ...

    def entry(self, index: Any) -> jax.Array: ...


def fetched(x: Any) -> jax.Array:
    """An array in host memory, or a :class:`Fetchable`, brought to the device."""
    return x.whole() if isinstance(x, Fetchable) else jax.device_put(x, jax.memory.Space.Device)


def entry(x: Any, index: Any) -> jax.Array:
    """One entry of a stack there, brought to the device."""
    if isinstance(x, Fetchable):
        return x.entry(index)
    return fetched(lax.dynamic_index_in_dim(x, index, keepdims=False))


@dataclass(frozen=True)
class Unpadded:
    """An array with padding, in host memory or a :class:`Fetchable`, as one without.

    Attributes:
      stored: The array.
      shape: Without padding.
    """

    stored: Any
    shape: tuple[int, ...]

    def whole(self) -> jax.Array:
        return fetched(self.stored)[tuple(map(slice, self.shape))]

    def entry(self, index: Any) -> jax.Array:
        return entry(self.stored, index)[tuple(map(slice, self.shape[1:]))]


def unpadded(stored: Any, shape: tuple[int, ...]) -> Any:
    """An array in host memory, or a :class:`Fetchable`, without the padding that it may have."""
    return stored if tuple(stored.shape) == shape else Unpadded(stored, shape)


@dataclass(frozen=True)
class Host:
    """How gradients leave.

    Attributes:
      smallest: arrays with fewer elements stay.
      sums: the square sums of a gradient's rows, without the loss scale.
    """

    smallest: int
    sums: Callable[[jax.Array], jax.Array]

    def takes(self, x: jax.Array, times: int = 1) -> bool:
        """Whether ``times`` such arrays are enough to leave."""
        return x.size * times >= self.smallest

    def send(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One row of a gradient on its way to the host, and its square sum."""
        return sent(x), jnp.sum(self.sums(x[None]))
