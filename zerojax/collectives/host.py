"""Transfers of parameters from host memory, where they are used, and of gradients to it.

In a loop over layers, forward and backward, a layer's parameters are fetched one iteration ahead,
while the previous layer runs (:mod:`zerojax.collectives.prefetch`). A layer's gradients are sent to
the host in the iteration that computes them. The residuals of a rematerialised block in a loop
(:mod:`zerojax.collectives.residuals`) move in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives.shard import HostStack, Shard


def on_host(v: object) -> bool:
    """Returns whether a value of the body is in host memory."""
    return isinstance(v, HostStack) or (isinstance(v, Shard) and v.gathering.host)


def send_to_host(x: jax.Array) -> jax.Array:
    """Sends an array to host memory."""
    # To a memory space: JAX drops the memory kinds of devices that are absent.
    return jax.device_put(x, jax.memory.Space.Host)


@runtime_checkable
class Fetchable(Protocol):
    """A parameter outside the program's memory, such as one on disk, that can be brought to the
    device: all of it by ``fetched()``, or one entry of its first dimension by ``entry(index)``."""

    def fetched(self) -> jax.Array: ...

    def entry(self, index: jax.Array | int) -> jax.Array: ...


def fetch_to_device(x: jax.Array | Fetchable) -> jax.Array:
    """Brings an array in host memory, or a :class:`Fetchable`, to the device."""
    return x.fetched() if isinstance(x, Fetchable) else jax.device_put(x, jax.memory.Space.Device)


def entry(x: jax.Array | Fetchable, index: jax.Array | int) -> jax.Array:
    """Brings one entry of a stack in host memory, or of a :class:`Fetchable`, to the device."""
    if isinstance(x, Fetchable):
        return x.entry(index)
    # Sliced in host memory, so that no more than the entry is copied.
    return fetch_to_device(lax.dynamic_index_in_dim(x, index, keepdims=False))


@dataclass(frozen=True)
class Unpadded:
    """A view without padding of an array in host memory or a :class:`Fetchable`.

    Attributes:
      stored: The array, with padding.
      shape: The shape without padding.
    """

    stored: jax.Array | Fetchable
    shape: tuple[int, ...]

    def fetched(self) -> jax.Array:
        return fetch_to_device(self.stored)[tuple(map(slice, self.shape))]

    def entry(self, index: jax.Array | int) -> jax.Array:
        return entry(self.stored, index)[tuple(map(slice, self.shape[1:]))]


def unpadded(stored: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array in host memory, or a :class:`Fetchable`, without its padding, if any."""
    return stored if tuple(stored.shape) == shape else Unpadded(stored, shape)


@dataclass(frozen=True)
class Host:
    """The way in which gradients are sent to host memory.

    Attributes:
      smallest: the fewest elements of an array that is sent.
      sums: function that computes the square sums of a gradient's rows, without the loss scale.
    """

    smallest: int
    sums: Callable[[jax.Array], jax.Array]

    def takes(self, x: jax.Array, times: int = 1) -> bool:
        """Returns whether ``times`` such arrays together are large enough to be sent."""
        return x.size * times >= self.smallest

    def send(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sends one row of a gradient to the host; returns it and its square sum."""
        # Clipping needs the norm before the update: the square sums spare a second way to the
        # device.
        return send_to_host(x), jnp.sum(self.sums(x[None]))
