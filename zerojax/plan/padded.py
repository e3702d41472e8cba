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
from zerojax.plan.places import DEVICE
from zerojax.xla import compat


class PaddedArray:
    """A leaf of a state with padding at rest, which NumPy and JAX take for an array of its shape.

    A step and ``zero.evaluate`` read the pieces where they lie. Any other use gathers the array
    along its padded dimensions, as ``sharding`` says.

    Args:
      stored: The array at rest: a ``jax.Array``, or another leaf of a state.
      shape: The shape without padding.

    Attributes:
      addressable_shards: The pieces at rest, with padding.
    """

    def __init__(self, stored: Any, shape: Sequence[int]) -> None:
        self.stored, self.shape, self.dtype = stored, tuple(shape), stored.dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.is_fully_addressable = stored.is_fully_addressable

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        at_rest = self.stored.sharding
        entries = layout.full(at_rest.spec, self.ndim)
        triples = zip(entries, self.shape, self.stored.shape, strict=True)
        return layout.sharding(at_rest.mesh, [e if n == m else None for e, n, m in triples])

    @property
    def addressable_shards(self) -> Any:
        return self.stored.addressable_shards

    def is_deleted(self) -> bool:
        deleted: bool = self.stored.is_deleted()
        return deleted

    def delete(self) -> None:
        self.stored.delete()

    def block_until_ready(self) -> PaddedArray:
        jax.block_until_ready(self.stored)
        return self

    def whole(self) -> jax.Array:
        """The array without padding, in device memory."""
        at_rest = self.stored if isinstance(self.stored, jax.Array) else self.stored.load()
        at_rest = jax.device_put(at_rest, at_rest.sharding.with_memory_kind(DEVICE))
        return jax.jit(self._cut, out_shardings=self.sharding)(at_rest)

    def _cut(self, x: Any) -> Any:
        return x[tuple(map(slice, self.shape))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(self._cut(np.asarray(self.stored)), dtype)
        return values.copy() if copy else values

    def __jax_array__(self) -> jax.Array:
        return self.whole()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "stored":
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __repr__(self) -> str:
        pieces = self.stored.sharding.shard_shape(self.stored.shape)
        return f"PaddedArray({self.dtype}{list(self.shape)}, in pieces of {list(pieces)})"


def _delegated(name: str) -> Any:
    return lambda self, *args: getattr(self.whole(), name)(*args)


for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
    for _prefix in ("", "r"):
        setattr(PaddedArray, f"__{_prefix}{_name}__", _delegated(f"__{_prefix}{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "getitem", "iter", "len"):
    setattr(PaddedArray, f"__{_name}__", _delegated(f"__{_name}__"))
compat.take_for_array(PaddedArray, PaddedArray.whole)


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
