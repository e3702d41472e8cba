"""Leaves on a disk beside the arrays they were filled with."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from offload.watched_store import WatchedStore

from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.disk.store import DiskStateError, DiskStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path, buffer_count=2) as store:
        yield store


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"))


def array(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(0).normal(size=shape) * 100
    return jax.device_put(jnp.asarray(values).astype(dtype), NamedSharding(mesh, spec))


def leaf_of(store: DiskStore, x: jax.Array, piece: int = 29, name: str = "mu.w") -> DiskLeaf:
    size = int(np.prod(x.sharding.shard_shape(x.shape)))
    pieces = [range(start, min(start + piece, size)) for start in range(0, size, piece)]
    return DiskLeaf(store, name, x.shape, x.dtype, x.sharding, pieces)


def filled(store: DiskStore, x: jax.Array) -> tuple[DiskLeaf, DiskArray]:
    leaf = leaf_of(store, x)
    leaf.fill(x)
    return leaf, leaf.advance()


CASES = [
    ((16, 6), P("a"), jnp.float32),
    ((6, 16), P(None, ("a", "b")), jnp.bfloat16),
    ((12, 10, 3), P("b", None), jnp.float32),
    ((8, 4, 5), P("a", "b"), jnp.float16),
    ((7, 11), P(), jnp.int32),
    ((33,), P(), jnp.bool_),
    ((), P(), jnp.float32),
    ((4, 0), P(), jnp.float32),
]


@pytest.mark.parametrize(("shape", "spec", "dtype"), CASES)
def test_it_holds_the_array(
    store: DiskStore, mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any
) -> None:
    x = array(mesh, shape, spec, dtype)
    _, got = filled(store, x)
    for name in ("shape", "dtype", "ndim", "size", "nbytes", "sharding", "is_fully_addressable"):
        assert getattr(got, name) == getattr(x, name), name
    np.testing.assert_array_equal(got, x)
    assert np.asarray(got).dtype == x.dtype
    loaded = got.load()
    assert loaded.sharding == x.sharding
    np.testing.assert_array_equal(loaded, x)


def test_a_slice_reads_its_pieces_alone(tmp_path: Path, mesh: Mesh) -> None:
    x = array(mesh, (16, 6), P("a"))
    told: list[str] = []
    with WatchedStore(tmp_path, lambda kind, _: told.append(kind)) as store:
        leaf = leaf_of(store, x, piece=6)
        leaf.fill(x)
        got = leaf.advance()
        index = (slice(3, 5), slice(None, -1))
        np.testing.assert_array_equal(got.read_slice(index), np.asarray(x)[index])
    assert told.count("read issued") == 2


def test_replicas_are_stored_once(store: DiskStore, mesh: Mesh) -> None:
    x = array(mesh, (8, 8), P("b"))
    _kept = filled(store, x)
    store.wait()
    assert sum(file.stat().st_size for file in store.path.glob("0*")) == x.nbytes


def test_what_nobody_holds_leaves_the_disk(store: DiskStore, mesh: Mesh) -> None:
    leaf, handle = filled(store, array(mesh, (8, 8), P("b")))
    kept = leaf_of(store, array(mesh, (8,), P()), name="kept")
    kept.fill(array(mesh, (8,), P()))
    del leaf, handle
    gc.collect()
    store.wait()
    assert len(list(store.path.glob("0*"))) == len(kept.chunks)


def test_pieces_updated_one_by_one(store: DiskStore, mesh: Mesh) -> None:
    """By device, and as a sharded array; the handles tell of it."""
    x = array(mesh, (12, 16), P("a"))
    leaf, first = filled(store, x)
    rows = NamedSharding(mesh, P("a"))
    for k in range(len(leaf.chunks)):
        reads = [leaf.read_shard(i, k).result().view(x.dtype) for i in range(len(leaf.shards))]
        piece = {d: y for s, y in zip(leaf.shards, reads, strict=True) for d in s.devices}
        assert set(piece) == set(jax.devices())
        if k % 2:
            leaf.write(k, {device: values + 1 for device, values in piece.items()})
        else:
            parts = [jax.device_put(piece[d][None], d) for d in jax.devices()]
            whole = (4, parts[0].size)
            leaf.write(k, jax.make_array_from_single_device_arrays(whole, rows, parts) + 1)
        with pytest.raises(DiskStateError, match=r"mu\.w in /.* is half updated.*restore the last"):
            np.asarray(first)
    second = leaf.advance()
    np.testing.assert_array_equal(second, np.asarray(x) + 1)
    assert first.is_deleted()
    assert not second.is_deleted()
    for act in (first.__array__, first.load):
        with pytest.raises(ValueError, match=r"mu\.w: this state was passed to an earlier step"):
            act()
    assert "deleted" in repr(first)
    assert repr(second).startswith("DiskArray(mu.w: float32[12, 16], P")
