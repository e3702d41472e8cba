"""The last lines of a script of transformers: files and lines with their names."""

import json
from pathlib import Path

import pytest

import zerojax
from zerojax import Trainer, TrainingArguments


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    made = Trainer.__new__(Trainer)  # no model: these methods only read
    made.args = TrainingArguments(str(tmp_path / "out"), learning_rate=1e-3)
    made.state = zerojax.trainer.TrainerState(
        global_step=4, max_steps=4, epoch=2.0, log_history=[{"eval_loss": 0.25, "epoch": 2.0}]
    )
    return made


def test_metrics_in_files(trainer: Trainer) -> None:
    trainer.save_metrics("train", {"train_loss": 1.5})
    trainer.save_metrics("eval", {"eval_loss": 0.5})
    out = Path(trainer.args.output_dir)
    assert json.loads((out / "train_results.json").read_text()) == {"epoch": 2.0, "train_loss": 1.5}
    both = {"epoch": 2.0, "train_loss": 1.5, "eval_loss": 0.5}
    assert json.loads((out / "all_results.json").read_text()) == both


def test_the_state_in_a_file(trainer: Trainer) -> None:
    trainer.save_state()
    state = json.loads((Path(trainer.args.output_dir) / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (4, 2.0)
    assert state["log_history"] == [{"eval_loss": 0.25, "epoch": 2.0}]
    assert state["is_world_process_zero"]


def test_pushing_says_how(trainer: Trainer) -> None:
    with pytest.raises(NotImplementedError, match="hf upload"):
        trainer.push_to_hub()
