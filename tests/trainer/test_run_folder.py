"""The folder of a run: what is there is given up last, for what was found."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from trainer.jobs import POINTS

import zerojax
from zerojax import TrainingArguments
from zerojax.checkpoint import CheckpointError
from zerojax.trainer.callbacks import TrainerState
from zerojax.trainer.data import Epochs
from zerojax.trainer.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("quick_compile")


def create(width: Any = 4) -> TrainState:
    params = {"w": jnp.full((8, width), 2.0)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


@pytest.fixture(scope="module")
def zero() -> zerojax.Zero:
    return zerojax.zero(stage=1)


def opened(path: Path, zero: zerojax.Zero, rows: Any = POINTS, **more: Any) -> RunFolder:
    args = TrainingArguments(str(path), per_device_train_batch_size=2, **more)
    return RunFolder(args, zero, Epochs.of(rows, args, 8))


def save(path: Path, zero: zerojax.Zero, *steps: int, **more: Any) -> None:
    with opened(path, zero, **more) as folder:
        for step in steps:
            state = zero.init(create).replace(step=jnp.asarray(step))
            folder.save(state, TrainerState(global_step=step), [], {})


def begin(path: Path, zero: zerojax.Zero, resume: Any, width: Any = 4, **more: Any) -> Any:
    make = partial(create, width)
    with opened(path, zero, **more) as folder:
        return folder.begin(resume, lambda: zero.init(make), lambda: zero.abstract_state(make))


def steps(path: Path) -> list[int]:
    return sorted(int(x.name) for x in (path / "checkpoints").iterdir() if x.name.isdecimal())


@pytest.fixture
def made(tmp_path: Path, zero: zerojax.Zero) -> Path:
    """Runs `own` and `other`, and another one whose newest checkpoint is damaged."""
    save(tmp_path / "own", zero, 2, 4, 6)
    save(tmp_path / "other", zero, 5)
    save(tmp_path / "damaged", zero, 5)
    save(tmp_path / "of other data", zero, 5, rows=POINTS[:60])
    shutil.rmtree(tmp_path / "damaged" / "checkpoints" / "5" / "state")
    return tmp_path


BAD = {
    "nowhere": "nowhere does not exist",
    "other/checkpoints/7": "has no step 7; it has 5",
    "damaged": "is missing",
    "of other data": "was trained on other data",
    "empty": "empty has no checkpoint to resume from",
    "other/checkpoints/05": "does not exist",
}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_path_is_checked_before_anything_is_removed(
    made: Path, zero: zerojax.Zero, overwrite: bool
) -> None:
    """And a path that is wrong is no reason to advise to remove."""
    (made / "empty").mkdir()
    for path, says in BAD.items():
        with pytest.raises(CheckpointError, match=says) as told:
            begin(made / "own", zero, made / path, overwrite_output_dir=overwrite)
        assert "overwrite_output_dir" not in str(told.value), path
        assert steps(made / "own") == [2, 4, 6], path


def test_a_checkpoint_of_another_model_removes_nothing(made: Path, zero: zerojax.Zero) -> None:
    for resume in (made / "other", made / "own/checkpoints/2"):
        with pytest.raises(CheckpointError, match="holds another model"):
            begin(made / "own", zero, resume, 5, overwrite_output_dir=True)
    with pytest.raises(TypeError):  # a model that cannot be created
        begin(made / "own", zero, None, "5", overwrite_output_dir=True)
    assert steps(made / "own") == [2, 4, 6]


def test_what_was_found_takes_the_place_of_what_was_there(made: Path, zero: zerojax.Zero) -> None:
    for resume in (None, made / "other", made / "own/checkpoints/2"):
        with pytest.raises(CheckpointError, match="remove them with overwrite_output_dir=True"):
            begin(made / "own", zero, resume)
    assert begin(made / "own", zero, True).state.global_step == 6
    assert steps(made / "own") == [2, 4, 6]
    begun = begin(made / "own", zero, made / "own/checkpoints/4", overwrite_output_dir=True)
    assert begun.state.global_step == int(begun.train_state.step) == 4
    assert steps(made / "own") == [2, 4]
    begun = begin(made / "own", zero, made / "other", overwrite_output_dir=True)
    assert begun.state.global_step == 5
    assert steps(made / "own") == []
