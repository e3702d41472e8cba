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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from zerojax.checkpoint.state_tree import is_key
from zerojax.plan import layout
from zerojax.plan.stored import StoredArray, unwrap_stored

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
    begins = [jnp.asarray(begin, jnp.uint32) for begin in (*start, *[0] * (x.ndim - len(start)))]
    ends = [jnp.asarray(end, jnp.uint32) for end in shape]
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return _from_host(x, begins, ends)
    words = _words(x)
    return jnp.sum(_mixed(words, _index_terms(words.shape), begins, ends), dtype=jnp.uint32)


def _mixed(
    words: jax.Array, places: jax.Array, begins: Sequence[jax.Array], ends: Sequence[jax.Array]
) -> jax.Array:
    """Returns each word's contribution to the checksum; 0 beyond ``ends``, unless it is empty."""
    mixed = _mix(words ^ (places + _index_term(begins)))
    for d, (begin, end) in enumerate(zip(begins, ends, strict=bool(ends))):
        index = begin + jax.lax.broadcasted_iota(jnp.uint32, words.shape, d)
        mixed = jnp.where(index < end, mixed, jnp.uint32(0))
    return mixed


def _from_host(x: jax.Array, begins: Sequence[jax.Array], ends: Sequence[jax.Array]) -> jax.Array:
    """Computes the checksum of an array in host memory, with one block on the device at a time."""

    def add(block: jax.Array, index: list[jax.Array], total: jax.Array) -> jax.Array:
        return total + checksum(jax.device_put(block, jax.memory.Space.Device), index, ends)

    total = jnp.uint32(0)
    for blocks in _blocks(x, begins, _BROUGHT):
        total = blocks.fold(add, total)
    return total


@dataclass(frozen=True)
class _Blocks:
    """Blocks of an array that have the same shape.

    Attributes:
      count: The number of blocks.
      get: Returns the ``i``-th block and the index of its first element.
    """

    count: int
    get: Callable[[jax.Array], tuple[jax.Array, list[jax.Array]]]

    def fold(self, add: Callable[..., jax.Array], first: jax.Array) -> jax.Array:
        """Folds ``add(block, index, sums)`` over all blocks, starting from ``first``."""
        return jax.lax.fori_loop(0, self.count, lambda i, sums: add(*self.get(i), sums), first)


def _blocks(x: jax.Array, begins: Sequence[jax.Array], most: int) -> Iterator[_Blocks]:
    """Splits an array into blocks of complete rows, grouped by block shape.

    The rows are those of the first dimension whose rows have at most ``most`` elements.
    """
    if not x.ndim:
        yield _Blocks(1, lambda _: (x, []))
        return
    inner = next(d for d in range(x.ndim) if math.prod(x.shape[d + 1 :]) <= most)
    outer, below = x.shape[:inner], x.shape[inner + 1 :]
    rows = max(1, min(x.shape[inner], most // max(1, math.prod(below))))

    def get(i: jax.Array, first: int, n: int, steps: int) -> tuple[jax.Array, list[jax.Array]]:
        index: list[ArrayLike] = [*jnp.unravel_index(i // steps, outer)] if outer else []
        index += [first + i % steps * n, *[0] * len(below)]
        block = jax.lax.dynamic_slice(x, index, (*[1] * inner, n, *below))
        return block, [b + jnp.asarray(j, jnp.uint32) for b, j in zip(begins, index, strict=True)]

    steps, rest = divmod(x.shape[inner], rows)
    for first, n, times in ((0, rows, steps), (steps * rows, rest, 1)):
        if n and times:
            yield _Blocks(
                math.prod(outer) * times,
                functools.partial(get, first=first, n=n, steps=times),
            )


def _index_terms(shape: Sequence[int]) -> jax.Array:
    """Returns the index term of the checksum if the first index is 0; uint32 of this shape."""
    terms = jnp.zeros(shape, jnp.uint32)
    for d in range(len(shape)):
        terms = terms + jax.lax.broadcasted_iota(jnp.uint32, shape, d) * jnp.uint32(_odd(d))
    return terms


def _index_term(index: Sequence[jax.Array]) -> jax.Array:
    """Returns the term of one index in the checksum; uint32 []."""
    return sum((i * jnp.uint32(_odd(d)) for d, i in enumerate(index)), jnp.uint32(0))


def begin_checksums(arrays: Mapping[str, jax.Array | StoredArray]) -> dict[str, jax.Array]:
    """Starts to compute the checksums of arrays on the devices, for :func:`finish_checksum`.

    Every device sums over its shards; arrays in host memory pass through the devices block by
    block. In a single process, no program has a collective: many small programs are in flight, and
    on virtual CPU devices each program would wait for threads that another program holds.

    Args:
      arrays: Arrays by name; padding does not count.

    Returns:
      Uint32 arrays by name: partial sums, or the checksum itself with several processes.
    """
    parts = {name: _parts(x) for name, x in arrays.items()}
    if jax.process_count() == 1:
        return parts
    return jax.jit(lambda t: jax.tree.map(lambda p: jnp.sum(p, dtype=jnp.uint32), t))(parts)


def finish_checksum(parts: object) -> int:
    """Returns a checksum that :func:`begin_checksums` started; waits for the devices."""
    return int(np.sum(np.asarray(parts), dtype=np.uint32))


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
    inner = next(d for d in range(words.ndim) if math.prod(words.shape[d + 1 :]) <= _BLOCK)
    rows = max(1, min(words.shape[inner], _BLOCK // max(1, math.prod(words.shape[inner + 1 :]))))
    # The index term is linear in the indices: a block's term is the first block's plus an offset.
    first_terms: np.ndarray = np.zeros((), np.uint32)
    for d, n in enumerate((rows, *words.shape[inner + 1 :]), inner):
        first_terms = first_terms[..., None] + np.arange(n, dtype=np.uint32) * np.uint32(_odd(d))
    begins = [*start] + [0] * (words.ndim - len(start))
    start_term = sum(_odd(d) * begin for d, begin in enumerate(begins))
    total = 0
    for outer in np.ndindex(words.shape[:inner]):
        for row in range(0, words.shape[inner], rows):
            block = words[outer][row : row + rows]
            block_term = start_term + sum(_odd(d) * i for d, i in enumerate((*outer, row)))
            mixed = block ^ (first_terms[: len(block)] + np.uint32(block_term % 2**32))
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
