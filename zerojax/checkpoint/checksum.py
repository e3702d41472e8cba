r"""A checksum of arrays that does not depend on the sharding.

For an array whose bits are the unsigned words :math:`w_i` at index :math:`i`, the checksum is

.. math:: \sum_i h(w_i \oplus \sum_d k_d\, i_d) \bmod 2^{32}

where :math:`h` mixes the 32 bits (the finalizer of MurmurHash3, a bijection) and :math:`k_d` is
an odd constant for each dimension. Because the checksum is a sum over elements, every device can
sum over its shards, and a reader over slices. A change of one word always changes the checksum;
other damage changes it with probability :math:`1 - 2^{-32}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.checkpoint.saved import block_shape
from zerojax.checkpoint.state_tree import is_key
from zerojax.offload.disk.slices import grid, shape_of
from zerojax.plan import layout
from zerojax.plan.places import PINNED
from zerojax.plan.stored import StoredArray, unpad, unwrap_stored

_Words = TypeVar("_Words", jax.Array, np.ndarray)
_BLOCK = 2**16
"""Number of words that the host mixes at once, so that they stay in the cache."""

_BROUGHT = 2**23
"""Maximum number of elements of a host-memory array that are on the device at once."""

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5)


@jax.jit
def checksum(
    x: jax.Array,
    start: Sequence[jax.typing.ArrayLike] = (),
    shape: Sequence[jax.typing.ArrayLike] = (),
) -> jax.Array:
    """Returns the checksum of an array, or the share of one slice; uint32 [].

    Args:
      x: An array or slice of any shape and dtype, PRNG keys too.
      start: The index of the slice's first element in the full array; empty for zeros.
      shape: The shape of the full array; elements of a padded slice beyond this shape do not
        count. Empty if all elements count.

    Example:
      >>> x = jnp.arange(12.0).reshape(3, 4)
      >>> int(checksum(x)) == int(checksum(x[:2]) + checksum(x[2:], (2, 0)))
      True
      >>> int(checksum(x[:2])) == int(checksum(x, shape=(2, 4)))
      True
    """
    if is_key(x):
        x = jax.random.key_data(x)
    words = _words(x)
    term, is_inside = jnp.uint32(0), jnp.asarray(True)
    for d, begin in enumerate([*start] + [0] * (words.ndim - len(start))):
        index = jnp.asarray(begin, jnp.uint32) + jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, d
        )
        term += index * jnp.uint32(_odd(d))
        if d < len(shape):
            is_inside &= index < jnp.asarray(shape[d], jnp.uint32)
    return jnp.sum(jnp.where(is_inside, _mix(words ^ term), jnp.uint32(0)), dtype=jnp.uint32)


def begin_share(x: jax.Array | StoredArray) -> Callable[[], int]:
    """Starts to compute this process's share of the checksum of an array, without padding.

    Every device sums over its shards, without a collective: many small programs are in flight, and
    on virtual CPU devices each program would wait for threads that another program holds. Blocks of
    an array in host memory come to the device one by one, in the function that is returned.

    Returns:
      A function that waits for the share and returns it.
    """
    at_rest = unwrap_stored(x)
    if at_rest.sharding.memory_kind != PINNED:
        parts = _parts(x)
        return lambda: sum(int(np.sum(part.data)) for part in _own_shards(parts))

    def sum_blocks() -> int:
        total = 0
        for shard in _own_shards(at_rest):
            start, size = [s.start or 0 for s in shard.index], shard.data.shape
            for box in grid(size, block_shape(size, 1, _BROUGHT)):
                block = _brought(shard.data, [s.start for s in box], shape_of(box))
                begin = [i + s.start for i, s in zip(start, box, strict=True)]
                total += int(checksum(block, begin, x.shape))
        return total

    return sum_blocks


@functools.partial(jax.jit, static_argnums=2)
def _brought(x: jax.Array, index: Sequence[int], size: tuple[int, ...]) -> jax.Array:
    """Brings a block of an array in host memory to the device. The array's NumPy view would be a
    copy that JAX keeps as long as the array."""
    return jax.device_put(jax.lax.dynamic_slice(x, index, size), jax.memory.Space.Device)


def _own_shards(x: jax.Array) -> list[jax.Shard]:
    return [shard for shard in x.addressable_shards if shard.replica_id == 0]


def _parts(x: jax.Array | StoredArray) -> jax.Array:
    """Returns partial sums, uint32 [devices], or [] if the array is on one device only."""
    at_rest = unwrap_stored(x)
    sharding = at_rest.sharding
    if len(sharding.device_set) == 1 or not isinstance(sharding, NamedSharding):
        return checksum(at_rest)
    shape = () if at_rest.shape == x.shape else x.shape
    return _sharded(at_rest, sharding.mesh, sharding.spec, shape)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sharded(x: jax.Array, mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.Array:
    axes = [layout.axes(entry) for entry in layout.full(spec, x.ndim)]
    used_axes = {axis for names in axes for axis in names}

    def shard_checksum(shard: jax.Array) -> jax.Array:
        start = [
            jax.lax.axis_index(names) * size if names else 0
            for names, size in zip(axes, shard.shape, strict=True)
        ]
        is_first = jnp.asarray(True)
        for axis in mesh.axis_names:
            is_first = is_first if axis in used_axes else is_first & (jax.lax.axis_index(axis) == 0)
        return jnp.where(is_first, checksum(shard, start, shape), jnp.uint32(0))[None]

    out_spec = PartitionSpec(tuple(mesh.axis_names))
    return jax.shard_map(
        shard_checksum, mesh=mesh, in_specs=spec, out_specs=out_spec, check_vma=False
    )(x)


def share(x: np.ndarray, start: Sequence[int] = ()) -> int:
    """Computes :func:`checksum` of a host array or slice with NumPy, 64-bit dtypes included.

    Example:
      >>> x = np.arange(12, dtype=np.int8).reshape(3, 4)
      >>> share(x) == int(checksum(x)) == (share(x[:2]) + share(x[2:], (2, 0))) % 2**32
      True
    """
    words = _host_words(x)
    sizes = block_shape(words.shape, 1, _BLOCK)
    # The index term is linear in the indices: a block's term is the first block's plus an offset.
    first_terms: np.ndarray = np.zeros((), np.uint32)
    for d, n in enumerate(sizes):
        first_terms = first_terms[..., None] + np.arange(n, dtype=np.uint32) * np.uint32(_odd(d))
    start_term = sum(_odd(d) * begin for d, begin in enumerate(start))
    total = 0
    for box in grid(words.shape, sizes):
        block = words[box]
        block_term = start_term + sum(_odd(d) * s.start for d, s in enumerate(box))
        mixed = block ^ (unpad(first_terms, block.shape) + np.uint32(block_term % 2**32))
        total += int(_mix(mixed).sum(dtype=np.uint64))
    return total % 2**32


def _odd(d: int) -> int:
    return (_ODD[d % len(_ODD)] + 2 * (d // len(_ODD))) & 0xFFFFFFFF


def _mix(x: _Words) -> _Words:
    """Applies the finalizer of MurmurHash3 to a uint32 JAX or NumPy array."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _host_words(x: np.ndarray) -> np.ndarray:
    """Returns the bits of a host array in an unsigned dtype of at most 32 bits, at least 1-D."""
    if x.dtype != bool and _bits(x.dtype) < 8:
        x = x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int8)
    complex_ = (2,) if np.issubdtype(x.dtype, np.complexfloating) else ()
    size = x.dtype.itemsize // (2 if complex_ else 1)
    wide = (2,) if size == 8 else ()
    unsigned = f"u{min(size, 4)}"
    flat = np.ascontiguousarray(x).reshape(-1).view(unsigned)
    return flat.reshape((*x.shape, *complex_, *wide) or (1,))


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits as uint32; elements of more than 32 bits add a last dimension of words."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool or _bits(x.dtype) < 8:
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int8)
    bits = _bits(x.dtype)
    if bits == 64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _bits(dtype: jnp.dtype) -> int:
    if jnp.issubdtype(dtype, jnp.bool_):
        return 1
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    return int(info(dtype).bits)
