"""Arrays of a state that are stored as JAX cannot shard an array of their shape: padded with zeros
to equal shards, or sharded along two dimensions by the factors of an axis.

JAX has only equal shards: 4096 rows over 24 devices are stored as 24 shards of 171 rows, of which
the last 8 rows are zeros. The spec of an array that is sharded by factors names parts of axes, on a
mesh whose axes are divided, and what JAX computes from the array has such a spec too. Steps and
users compute with the array in its own shape: they see neither the padding nor the divided mesh.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import serialization

from zerojax.plan import layout
from zerojax.plan.places import DEVICE
from zerojax.xla import compat
from zerojax.xla.types import PyTree

Arr = TypeVar("Arr", jax.Array, np.ndarray)


class StoredArray:
    """A leaf of a state that NumPy and JAX treat as an array of its shape.

    A step and ``zero.evaluate`` read the shards in place. Any other use gathers the array along the
    dimensions that JAX cannot shard in this way, to the sharding ``sharding``. A copy by ``pickle``
    is a ``jax.Array``.

    The class is not a ``jax.Array``: libraries that test for one read its shards next, which here
    have padding or are on a divided mesh, and orbax would write them as the array. Therefore
    ``jax.debug.visualize_array_sharding(x)`` draws the array that JAX receives, ``sharding``;
    ``jax.debug.visualize_array_sharding(x.stored)`` draws the shards at rest.

    Args:
      stored: The array at rest: a ``jax.Array``, or another leaf of a state.
      shape: The shape without padding.

    Attributes:
      stored: The array at rest, as passed.
      addressable_shards: The shards at rest, with padding.
    """

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # == is element by element

    def __init__(self, stored: Any, shape: Sequence[int]) -> None:
        self.stored: Any = stored
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype = stored.dtype
        self.ndim: int = len(self.shape)
        self.size: int = math.prod(self.shape)
        self.nbytes: int = self.size * self.dtype.itemsize
        self.is_fully_addressable: bool = stored.is_fully_addressable

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """The sharding of the array that JAX receives: full axes of the mesh that divide the shape.

        JAX reads this attribute of every argument, and rejects unequal shards; the sharding of the
        shards at rest is ``stored.sharding``.
        """
        at_rest = self.stored.sharding
        return layout.on_full_axes(at_rest.mesh, at_rest.spec, self.shape)

    @property
    def addressable_shards(self) -> Sequence[jax.Shard]:
        return cast("Sequence[jax.Shard]", self.stored.addressable_shards)

    def is_deleted(self) -> bool:
        deleted: bool = self.stored.is_deleted()
        return deleted

    def delete(self) -> None:
        self.stored.delete()

    def block_until_ready(self) -> StoredArray:
        jax.block_until_ready(self.stored)
        return self

    def gathered(self) -> jax.Array:
        """Returns the array without padding, in device memory, with the sharding ``sharding``."""
        at_rest = self.stored if isinstance(self.stored, jax.Array) else self.stored.load()
        at_rest = jax.device_put(at_rest, at_rest.sharding.with_memory_kind(DEVICE))
        return cast(
            jax.Array,
            jax.jit(unpad, static_argnums=1, out_shardings=self.sharding)(at_rest, self.shape),
        )

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(unpad(np.asarray(self.stored), self.shape), dtype)
        return values.copy() if copy else values

    def __jax_array__(self) -> jax.Array:
        return self.gathered()

    def __deepcopy__(self, memo: dict[int, object]) -> StoredArray:
        return StoredArray(copy.deepcopy(self.stored, memo), self.shape)

    def __reduce__(self) -> str | tuple[object, ...]:
        return self.gathered().__reduce__()

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask an instance without attributes, on which gathered() would recurse.
        if name.startswith("_") or name in ("stored", "sharding"):
            raise AttributeError(name)
        if isinstance(self.stored, jax.Array) and not hasattr(self.stored, name):
            raise AttributeError(name)  # asked by hasattr, for which nothing is gathered
        return getattr(self.gathered(), name)

    def __repr__(self) -> str:
        shard_shape = self.stored.sharding.shard_shape(self.stored.shape)
        spec = tuple(self.stored.sharding.spec)
        return (
            f"StoredArray({self.dtype}{list(self.shape)}, P{spec} in shards of {list(shard_shape)})"
        )


def unpad(x: Arr, shape: tuple[int, ...]) -> Arr:
    """Removes the padding from an array of ``shape``."""
    return x[tuple(map(slice, shape))]


def _delegated(name: str) -> Callable[..., object]:
    return lambda self, *args: getattr(self.gathered(), name)(*args)


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
_OTHERS = "pos neg abs invert round eq ne lt le gt ge getitem iter len contains bool int float"
# Python looks for operators in the class, past __getattr__.
for _name in [
    *_BINARY.split(),
    *(f"r{name}" for name in _BINARY.split()),
    *_OTHERS.split(),
    *("index", "complex", "format"),
]:
    setattr(StoredArray, f"__{_name}__", _delegated(f"__{_name}__"))
compat.take_for_array(StoredArray, StoredArray.gathered)
serialization.register_serialization_state(
    StoredArray, StoredArray.gathered, lambda _, restored: restored
)


def unwrap_stored(tree: PyTree) -> PyTree:
    """Replaces each :class:`StoredArray` of a tree by its array at rest."""
    return jax.tree.map(lambda x: x.stored if isinstance(x, StoredArray) else x, tree)


def user_leaf(x: Any, shape: Sequence[int]) -> Any:
    """Returns the leaf that the user sees for the array ``x`` at rest."""
    if isinstance(x, jax.core.Tracer):  # in a program of the user's, which the step rejects
        return x
    plain = tuple(x.shape) == tuple(shape) and not layout.is_divided(x.sharding)
    return x if plain else StoredArray(x, shape)


def pad(x: Arr, shape: Sequence[int]) -> Arr:
    """Pads an array with zeros at the ends of its dimensions, up to ``shape``."""
    if tuple(x.shape) == tuple(shape):
        return x
    widths = [(0, m - n) for n, m in zip(x.shape, shape, strict=True)]
    return cast(Arr, (np if isinstance(x, np.ndarray) else jnp).pad(x, widths))
