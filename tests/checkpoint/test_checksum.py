"""The checksum: the same however an array is cut, another when anything in it changes."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.checkpoint.checksum import begin_share, checksum, share
from zerojax.plan import layout
from zerojax.plan.stored import StoredArray, pad

pytestmark = pytest.mark.usefixtures("quick_compile")

ON_DEVICES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "bfloat16",
    "float32", "complex64",
]  # fmt: skip
WIDE = ["int64", "uint64", "float64", "complex128"]
SHAPE = (8, 16, 5)


def values(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, shape) if "e8m0" not in dtype else 2.0 ** rng.integers(0, 5, shape)
    x = x * (1 + 2j) if dtype.startswith("complex") else x
    return x.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def cuts(x: np.ndarray, *sizes: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
    steps = [range(0, n, size) for n, size in zip(x.shape, sizes, strict=True)]
    return [
        (start, x[tuple(slice(i, i + n) for i, n in zip(start, sizes, strict=True))])
        for start in itertools.product(*steps)
    ]


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint16", "float8_e5m2", "float32", "complex64"])
def test_devices_host_shards_and_slices_agree(dtype: str) -> None:
    x = values(dtype)
    expected = share(x)
    on_device = jnp.asarray(x)
    assert str(on_device.dtype) == dtype
    assert int(checksum(on_device)) == expected
    sharding = NamedSharding(zerojax.mesh(2), PartitionSpec(None, "data"))
    assert int(checksum(jax.device_put(on_device, sharding))) == expected
    for sizes in [(1, 16, 5), (3, 5, 2), (8, 1, 1)]:
        pieces = cuts(x, *sizes)
        assert sum(share(piece, start) for start, piece in pieces) % 2**32 == expected
    start, piece = cuts(x, 5, 4, 3)[-1]
    assert int(checksum(jnp.asarray(piece), start)) == share(piece, start)


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits_on_the_host(dtype: str) -> None:
    x = values(dtype)
    assert jnp.asarray(x).dtype != dtype  # no jax_enable_x64
    pieces = cuts(x, 3, 4, 2)
    assert sum(share(piece, start) for start, piece in pieces) % 2**32 == share(x)
    with jax.enable_x64(True):
        assert int(checksum(jnp.asarray(x))) == share(x)


def test_keys_are_their_data() -> None:
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(3, impl=impl), 4)
        assert int(checksum(keys)) == share(np.asarray(jax.random.key_data(keys)))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), "complex64"), ((11, 4), "bool"), ((2, 3, 40_000), "float32")]
)
def test_padding_does_not_count(shape: tuple[int, ...], dtype: str) -> None:
    x = values(dtype, shape)
    padded = np.pad(x, [(0, 2)] * x.ndim, constant_values=7)
    begin = tuple(range(len(shape)))
    ends = tuple(n + d for d, n in enumerate(shape))
    assert int(checksum(jnp.asarray(padded), begin, ends)) == share(x, begin)


@pytest.mark.parametrize("spec", [("data",), (None, "data"), ("data:(1)2", "data:(2)4")])
def test_padding_over_devices(spec: tuple[str | None, ...]) -> None:
    x = values("float32", (9, 13))
    padded = jax.device_put(pad(x + 1, (16, 16)), layout.sharding(zerojax.mesh(), spec))
    begun = begin_share(StoredArray(padded, x.shape))
    assert begun() % 2**32 == share(x + 1)


@pytest.mark.parametrize("dtype", [*ON_DEVICES, *WIDE])
def test_every_single_bit_counts(dtype: str) -> None:
    x = values(dtype, (5, 3))
    bits = x.view(np.uint8).reshape(-1)
    used = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "bool": 1}.get(dtype, 8)
    sums = {share(x)}
    for at in range(bits.size):
        for bit in range(used):
            bits[at] ^= 1 << bit
            sums.add(share(x))
            bits[at] ^= 1 << bit
    assert len(sums) == 1 + bits.size * used


def test_order_counts() -> None:
    x = np.arange(42, dtype=np.float32).reshape(6, 7)
    expected = share(x)
    flat = x.reshape(-1)
    for i, j in itertools.combinations(range(flat.size), 2):
        flat[[i, j]] = flat[[j, i]]
        assert share(x) != expected
        flat[[i, j]] = flat[[j, i]]
    assert share(x[::-1]) != expected
    assert share(x[:, ::-1]) != expected
    assert share(np.ascontiguousarray(x.T)) != expected
    assert share(np.roll(x, 1)) != expected
