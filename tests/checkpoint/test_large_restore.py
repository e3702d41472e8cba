"""A state of 380 MB is restored, and no device holds all of it; of a gigabyte no process does."""

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import pytest
from checkpoint import together
from checkpoint.states import KEY, assert_same, create_linen, create_uneven, filled, zero_of

import zerojax
from zerojax.checkpoint import Checkpointer

pytestmark = pytest.mark.slow

SMALL = 10_000  # bytes of counts, rates and norms, which every device has


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not one that pytest keeps."""
    with TemporaryDirectory() as name:
        yield Path(name)


def saved(folder: Path, matrices: int) -> Path:
    """Saved by one process with one device, at stage 0."""
    zero = zerojax.zero(stage=0, mesh=zerojax.mesh(1))
    with Checkpointer(folder, zero) as checkpointer:
        create = functools.partial(together.create_large, matrices=matrices)
        checkpointer.save(1, zero.init(create, KEY))
    return folder


class Watch(threading.Thread):
    """Looks for the largest array that lies on one device alone: all the time, and whenever such
    arrays become one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(daemon=True)
        self.largest: list[int] = []  # bytes, look by look
        self._over = threading.Event()
        self._before = jax.live_arrays()
        self._known = {id(x) for x in self._before}
        join = jax.make_array_from_single_device_arrays

        def joined(*arguments: Any, **options: Any) -> jax.Array:
            self.look()
            return join(*arguments, **options)

        patch.setattr(jax, "make_array_from_single_device_arrays", joined)

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(0.002):
            self.look()

    def look(self) -> None:
        sizes = [x.nbytes for x in jax.live_arrays()
                 if id(x) not in self._known and len(x.sharding.device_set) == 1]  # fmt: skip
        self.largest.append(max(sizes, default=0))


def test_no_device_holds_all_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = zerojax.zero(stage=3)
    abstract = zero.abstract_state(functools.partial(together.create_large, matrices=3), KEY)
    small = saved(folder / "small", 3)
    with Checkpointer(small, zero, read_only=True) as checkpointer, Watch(monkeypatch) as watch:
        restored = checkpointer.restore(abstract)
    assert len(watch.largest) >= 9  # three matrices, each with two moments
    assert max(watch.largest) == together.SHAPE[0] * together.SHAPE[1] * 4 / 8
    held = together.held(restored, growth=0)
    assert held.complete > 3 * 12 * together.SHAPE[0] * together.SHAPE[1]
    assert all(held.complete / 8 < each < held.complete / 8 + SMALL for each in held.devices)
    together.assert_large(restored)


@pytest.mark.sweep
def test_no_process_holds_all_of_it(
    folder: Path, in_two_processes: Callable[..., list[together.Held]]
) -> None:
    """Two processes restore it and save it again, together; one reads that on other devices."""
    large = saved(folder / "large", together.MATRICES)
    for held in in_two_processes(together.restore_and_save, large, folder / "again"):
        assert held.complete > 0.85 * together.BYTES
        assert len(held.devices) == 4
        assert all(held.complete / 8 < each < held.complete / 8 + SMALL for each in held.devices)
        assert held.complete / 2 < held.growth < 0.7 * held.complete
    zero = zerojax.zero(stage=2, mesh=zerojax.mesh(2))
    with Checkpointer(folder / "again", zero, read_only=True) as checkpointer:
        restored = checkpointer.restore(zero.abstract_state(together.create_large, KEY))
    together.assert_large(restored)


def test_processes_take_every_turn_together(
    tmp_path: Path, in_two_processes: Callable[..., list[None]]
) -> None:
    in_two_processes(together.take_every_turn, tmp_path)
    zero = zero_of(1, 4)
    with Checkpointer(tmp_path, zero, read_only=True) as checkpointer:
        assert checkpointer.all_steps() == [2, 3]
        got = checkpointer.restore(zero.abstract_state(create_linen, KEY))
    assert_same(got, zero.init(create_linen, KEY))
    with Checkpointer(tmp_path / "padded", zero, read_only=True) as checkpointer:
        abstract = zero.abstract_state(create_uneven, KEY)
        assert_same(checkpointer.restore(abstract), filled(abstract))
