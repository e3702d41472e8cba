"""Two processes, each with its own rows, have the numbers of one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer.jobs import POINTS, Classifier

from zerojax import Trainer, TrainingArguments
from zerojax.trainer import classification_loss

pytestmark = pytest.mark.usefixtures("quick_compile")


def job(process: int, folder: str) -> tuple[list[float], list[float], Any]:
    """Losses of training and of evaluations of 21 rows, and the predictions."""
    args = TrainingArguments(
        folder, per_device_train_batch_size=1, num_train_epochs=2, fsdp="full_shard",
        logging_steps=1, eval_strategy="epoch", save_steps=10, learning_rate=0.05,
    )  # fmt: skip
    data: Any = dict(train_dataset=POINTS, eval_dataset=POINTS[:21], loss=classification_loss)
    trainer = Trainer(Classifier(), args, **data)
    trainer.save_model()  # of a state that no checkpoint has
    trainer.train()
    output = trainer.predict(POINTS[:21])
    history = trainer.state.log_history
    losses = ([log[name] for log in history if name in log] for name in ("loss", "eval_loss"))
    return (*losses, output.predictions)


@pytest.mark.sweep
def test_two_processes_have_the_numbers_of_one(
    in_two_processes: Callable[..., list[Any]], quick_processes: None, tmp_path: Path
) -> None:
    alone = job(0, str(tmp_path / "one"))
    for each in in_two_processes(job, str(tmp_path / "two")):
        for ours, theirs in zip(each, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for folder in ("one", "two"):
        names = {path.name for path in (tmp_path / folder).iterdir() if path.is_dir()}
        assert names == {"checkpoints", "model"}
        assert (tmp_path / folder / "model" / "model.safetensors").exists()


class Stream:
    def __iter__(self) -> Iterator[Any]:
        return iter(POINTS)


def streamed(process: int, folder: str) -> list[list[float]]:
    """Losses of a run over a stream, by updates and by evaluations."""
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=6, fsdp="full_shard", logging_steps=1,
        eval_strategy="steps", eval_steps=1, save_strategy="no", learning_rate=0.2,
    )  # fmt: skip
    data: Any = dict(train_dataset=Stream(), eval_dataset=Stream(), loss=classification_loss)
    trainer = Trainer(Classifier(), args, **data)
    trainer.train()
    history = trainer.state.log_history
    return [[log[k] for log in history if k in log] for k in ("loss", "eval_loss")]


@pytest.mark.sweep
def test_two_processes_read_a_stream_as_one(
    in_two_processes: Callable[..., list[Any]], quick_processes: None, tmp_path: Path
) -> None:
    alone = streamed(0, str(tmp_path / "one"))
    for each in in_two_processes(streamed, str(tmp_path / "two")):
        np.testing.assert_allclose(each, alone, rtol=1e-5)
