"""Arrays of a state that lie in equal pieces on any number of devices, padded with zeros.

JAX shards an array into equal pieces alone: 4096 rows over 24 devices lie as 24 pieces of 171 rows,
the last 8 rows zeros. A step computes on the array without them, and so does everybody else: the
padding is never seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.plan import layout


class PaddedArray:
    """A leaf of a state, as a ``jax.Array`` is, with padding at rest.

    NumPy and JAX take one for an array of its ``shape``. Each use in JAX outside of a step and
    ``zero.evaluate`` gathers it along the padded dimensions.

    Args:
      stored: The array at rest: a ``jax.Array``, or another leaf of a state.
      shape: The shape without padding.
    """

    def __init__(self, stored: Any, shape: Sequence[int]) -> None:
        self.stored, self.shape = stored, tuple(shape)
        self.dtype, self.sharding = stored.dtype, stored.sharding
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.is_fully_addressable = stored.is_fully_addressable

    def is_deleted(self) -> bool:
        deleted: bool = self.stored.is_deleted()
        return deleted

    def block_until_ready(self) -> PaddedArray:
        jax.block_until_ready(self.stored)
        return self

    def whole(self) -> jax.Array:
        """The array without padding, whole along the dimensions that were padded."""
        spec = layout.full(self.sharding.spec, self.ndim)
        pairs = zip(spec, self.shape, self.stored.shape, strict=True)
        even = [entry if n == m else None for entry, n, m in pairs]
        to = layout.sharding(self.sharding.mesh, even, self.sharding.memory_kind)
        return jax.jit(self._cut, out_shardings=to)(self.stored)

    def _cut(self, x: Any) -> Any:
        return x[tuple(map(slice, self.shape))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self._cut(np.asarray(self.stored))
        return np.array(values, dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __repr__(self) -> str:
        return f"PaddedArray({self.dtype}{list(self.shape)}, {self.sharding.spec})"


def stored(tree: Any) -> Any:
    """A tree with the arrays at rest in place of its padded ones."""
    return jax.tree.map(lambda x: x.stored if isinstance(x, PaddedArray) else x, tree)


def shown(x: Any, shape: Sequence[int]) -> Any:
    """The leaf of a state that ``x`` is at rest, which may be padded."""
    return x if tuple(x.shape) == tuple(shape) else PaddedArray(x, shape)


def pad(x: Any, shape: Sequence[int]) -> Any:
    """An array with zeros at the ends of its dimensions, up to ``shape``."""
    if tuple(x.shape) == tuple(shape):
        return x
    widths = [(0, m - n) for n, m in zip(x.shape, shape, strict=True)]
    return (np if isinstance(x, np.ndarray) else jnp).pad(x, widths)
