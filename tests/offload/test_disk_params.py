"""Parameters that a program reads from the disk while it runs."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from offload.watched_store import WatchedStore

from zerojax.offload.disk.array import DiskArray, DiskLeaf
from zerojax.offload.disk.store import DiskStateError
from zerojax.offload.disk_params import DiskParam, ParamReader

pytestmark = pytest.mark.usefixtures("quick_compile")

VALUES = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6)
SHARDING = NamedSharding(jax.make_mesh((2, 2), ("a", "b")), P(None, "b", "a"))


class Stored:
    """A stack on a disk, one piece an entry, and the keys that were read."""

    def __init__(self, store: WatchedStore) -> None:
        leaf = DiskLeaf(store, "w", VALUES.shape, VALUES.dtype, SHARDING,
                        [range(6 * i, 6 * i + 6) for i in range(5)])  # fmt: skip
        leaf.fill(jax.device_put(VALUES, SHARDING))
        store.wait()
        self.array: DiskArray = leaf.advance()
        self.store = store
        self.reader = ParamReader(None)
        self.param = DiskParam(self.reader, 3, VALUES.shape, VALUES.dtype, SHARDING)
        self.reader.use([None, None, None, self.array])


@pytest.fixture
def issued() -> list[str]:
    return []


@pytest.fixture
def stored(tmp_path: Path, issued: list[str]) -> Iterator[Stored]:
    def event(kind: str, key: str) -> None:
        if kind == "read issued":
            issued.append(key)

    with WatchedStore(tmp_path, event) as store:
        yield Stored(store)


def test_fetched_and_entries(stored: Stored) -> None:
    np.testing.assert_array_equal(jax.jit(stored.param.fetched)(), VALUES)
    entry = jax.jit(stored.param.entry)
    np.testing.assert_array_equal(entry(jnp.int32(3)), VALUES[3])
    assert entry(0).sharding.is_equivalent_to(NamedSharding(SHARDING.mesh, P("b", "a")), 2)
    stored.reader.check()


@pytest.mark.parametrize("order", [range(5), range(4, -1, -1), [0, 0, 2, 4, 1]])
def test_each_entry_is_read_once_in_either_direction(
    stored: Stored, issued: list[str], order: list[int]
) -> None:
    for i in order:
        np.testing.assert_array_equal(stored.reader.read(3, 1, i), VALUES[i, 2:, :3])
    if isinstance(order, range):
        assert len(issued) == len(set(issued)) == 5


def test_what_cannot_be_read(stored: Stored) -> None:
    """Zeros, so that the program comes to its end, and the error after it."""
    (file, *_) = sorted(stored.store.path.glob("0*"))
    file.write_bytes(b"")
    shards = [stored.reader.read(3, position, 0) for position in range(4)]
    assert sum(not shard.any() for shard in shards) == 1
    with pytest.raises(DiskStateError, match="is damaged"):
        stored.reader.check()
    stored.reader.use([None, None, None, stored.array])
    stored.reader.check()
