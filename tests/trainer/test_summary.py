"""Lines, logs, events and checkpoints of runs beside those of transformers' Trainer, recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
from trainer.jobs import POINTS, Classifier
from trainer.recorded_runs import BATCH, FILE, ROWS, RUNS, arguments, seen

from zerojax import Trainer, TrainingArguments
from zerojax.trainer import EarlyStoppingCallback, TrainerCallback, classification_loss
from zerojax.trainer.callbacks import EVENTS, UNSUPPORTED_EVENTS

pytestmark = pytest.mark.usefixtures("quick_compile")
RECORDED = json.loads(FILE.read_text())


class Recorder(TrainerCallback):
    """Records every event by name."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            return lambda *args, **kwargs: self.events.append(name)
        return super().__getattribute__(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_logs_calls_and_keeps_what_transformers_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, expected, recorder = RUNS[name], RECORDED[name], Recorder()
    args = TrainingArguments(
        **arguments(run, str(tmp_path)), per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    callbacks: list[Any] = [recorder]
    if run.patience:
        callbacks.append(EarlyStoppingCallback(*run.patience))
    held_out = POINTS[:16]
    trainer: Trainer = Trainer(
        Classifier(),
        args,
        train_dataset=POINTS[:ROWS],
        eval_dataset={name: held_out for name in run.sets} or held_out,
        loss=classification_loss,
        compute_metrics=lambda given: {"score": run.scores[trainer.state.global_step]},
        callbacks=callbacks,
    )
    assert trainer.epochs.batch == BATCH
    trainer.train()
    kept = [int(x.name) for x in (tmp_path / "checkpoints").iterdir() if x.name.isdecimal()]
    found = json.loads(json.dumps(seen(trainer, recorder.events, kept)))
    assert [set(log) for log in found.pop("logs")] == [
        {*log} - {"total_flos"} for log in expected["logs"]
    ]
    assert found.pop("events") == [x for x in expected["events"] if x not in UNSUPPORTED_EVENTS]
    assert found == {k: v for k, v in expected.items() if k not in ("logs", "events")}
    assert "<svg" in (tmp_path / "training.svg").read_text()
    check_lines(capsys.readouterr().out.splitlines(), trainer, len(run.sets) or 1)


def check_lines(lines: list[str], trainer: Trainer, sets: int) -> None:
    """Every evaluation has a line, and the summary names the results."""
    state = trainer.state
    evaluations = sum(any("score" in k for k in log) for log in state.log_history)
    assert sum("_score " in line and line.startswith("step ") for line in lines) == evaluations
    assert evaluations % sets == 0
    summary = "\n".join(lines[-4:])
    assert f"trained to step {state.global_step}/10" in summary
    assert f"at step {state.best_global_step}" in summary
    assert "checkpoint " in summary
    assert "training.svg" in summary
