"""A save reports success for a complete step alone, and keeps nothing that it has copied."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint.states import KEY, create_linen, create_uneven, zero_of
from flax.training.train_state import TrainState
from groups import LIMIT

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint import record as records
from zerojax.plan.stored import unwrap_stored

pytestmark = pytest.mark.usefixtures("quick_compile")


def create(key: jax.Array) -> TrainState:
    params = {"w": jax.random.normal(key, (16, 8))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def emptied(self: Any, directory: Any) -> None:
    ocp_finalize(self, directory)
    (directory / "manifest.ocdbt").unlink()


ocp_finalize = ocp.PyTreeCheckpointHandler.finalize
INCOMPLETE = {
    "manifest lost": (ocp.PyTreeCheckpointHandler, "finalize", emptied),
    "record lost": (records, "write", lambda *_: None),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_a_step_that_is_not_complete_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    zero = zerojax.zero(stage=1)
    state = zero.init(create, KEY)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(*INCOMPLETE[kind])
            checkpointer.save(2, state)
            with pytest.raises(CheckpointError, match=r"step 2 was not saved .*\(step 1 is the"):
                checkpointer.wait()
        assert checkpointer.all_steps() == [1]
        assert not [*tmp_path.glob("2*")]
        checkpointer.save(2, state)


@pytest.mark.slow
@pytest.mark.parametrize("make", [create_linen, create_uneven])
def test_a_save_lets_the_state_go(tmp_path: Path, make: Any) -> None:
    """Without waiting for it."""
    zero = zero_of(3, 7)
    state = zero.init(make, KEY)
    arrays = [weakref.ref(x) for x in jax.tree.leaves(unwrap_stored(state))]
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        del state
        until = time.monotonic() + LIMIT
        while any(x() is not None for x in arrays) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.02)
        left = [x().nbytes for x in arrays if x() is not None]
        assert not left
