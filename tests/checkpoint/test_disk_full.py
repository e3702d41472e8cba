"""A disk that fills up while a checkpoint is written."""

import errno
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint.pending import PendingSave

MEGABYTES = 24

# orbax tells of a failed write once more for each array, where its futures are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Within the test, so that no other one hears of it."""
    yield
    gc.collect()


def create(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (1024, 512))}  # 6 MB with its moments
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


@pytest.mark.slow
def test_the_run_is_told_and_goes_on(
    small_disk: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = zerojax.zero(stage=3)
    states = [zero.init(create, jax.random.key(i)) for i in range(4)]
    folder, filler = tmp_path / "run", tmp_path / "filler"
    with Checkpointer(folder, zero) as checkpointer:
        checkpointer.save(0, states[0])
        checkpointer.wait()

        with monkeypatch.context() as patch:
            if small_disk:
                filler.write_bytes(b"x" * (MEGABYTES - 6 - 3) * 2**20)
            else:
                patch.setattr(PendingSave, "finish", full_disk)
            checkpointer.save(1, states[1])
            with pytest.raises(CheckpointError) as told:
                checkpointer.save(2, states[2])
        said = str(told.value)
        assert said.startswith(f"step 1 was not saved in {folder} (step 0 is the last good one)")
        assert "space" in said.lower()
        assert checkpointer.all_steps() == [0]
        assert not [*folder.glob("*tmp*")], "what was written of step 1 still takes room"

        filler.unlink(missing_ok=True)
        checkpointer.save(3, states[3])
        checkpointer.wait()
        assert checkpointer.all_steps() == [0, 3]
        for step in (0, 3):
            got = checkpointer.restore(states[0], step)
            np.testing.assert_array_equal(got.params["w"], states[step].params["w"])


def full_disk(self: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_closing_tells_of_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PendingSave, "finish", full_disk)
    zero = zerojax.zero(stage=0)
    state = zero.init(create, jax.random.key(0))
    with (
        pytest.raises(CheckpointError, match=r"step 5 was not saved .*there is none yet"),
        Checkpointer(tmp_path, zero) as checkpointer,
    ):
        checkpointer.save(5, state)
    monkeypatch.undo()
    with Checkpointer(tmp_path, zero) as checkpointer:  # and let the folder go
        checkpointer.save(5, state.replace(step=jnp.asarray(1)))
