"""What the system refuses, as without permission or with too many open files, is not damage."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from checkpoint.states import KEY, assert_same
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, inspect
from zerojax.checkpoint import record as records

pytestmark = pytest.mark.usefixtures("quick_compile")


def create(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (16, 8))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-3))


@pytest.fixture
def saved(open_to_all: Path) -> tuple[Path, zerojax.Zero, Any]:
    """A folder of steps 1 and 2."""
    zero = zerojax.zero(stage=1)
    state = zero.init(create, KEY)
    with Checkpointer(open_to_all, zero) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(2, state)
    return open_to_all, zero, state


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """As in a program that has opened as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            os.close(file)


def refused(error: CheckpointError, says: str) -> None:
    assert not isinstance(error, DamagedCheckpointError)
    said = str(error)
    assert says in said
    assert "The system refused to read, so this is no sign of damage" in said
    assert "complete" not in said


def test_too_many_open_files(saved: tuple[Path, zerojax.Zero, Any]) -> None:
    folder, zero, state = saved
    with Checkpointer(folder, zero, read_only=True) as checkpointer:
        assert_same(checkpointer.restore(state), state)
        inspect(folder)
        acts: list[Any] = [
            lambda: checkpointer.restore(state, 2),
            lambda: checkpointer.restore(state),
            checkpointer.all_steps,
            lambda: checkpointer.extra(2),
        ]
        for act in acts:
            with pytest.raises(CheckpointError) as told, no_more_files():
                act()
            refused(told.value, "Too many open files")
            assert "ulimit -n" in str(told.value)
        assert_same(checkpointer.restore(state), state)


@pytest.mark.parametrize(
    ("raises", "number"),
    [("record", errno.EIO), ("arrays", errno.EACCES), ("arrays", errno.ESTALE)],
)
def test_each_place_that_reads(
    saved: tuple[Path, zerojax.Zero, Any],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    raises: str,
) -> None:
    """Of the record, and of arrays, where tensorstore has the system's words alone."""
    folder, zero, state = saved

    def fails(*_: Any, **__: Any) -> Any:
        if raises == "arrays":
            raise ValueError(f"PERMISSION_DENIED: Error opening d/1 [{os.strerror(number)}]")
        raise OSError(number, os.strerror(number))

    place: Any = {
        "record": (records.json, "loads"),
        "arrays": (zerojax.checkpoint.saved.tensorstore, "open"),
    }[raises]
    with Checkpointer(folder, zero, read_only=True) as checkpointer:
        monkeypatch.setattr(*place, fails)
        with pytest.raises(CheckpointError) as told:
            checkpointer.restore(state)
        refused(told.value, os.strerror(number))
