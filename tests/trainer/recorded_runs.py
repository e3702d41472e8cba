"""Logs, events and checkpoints of transformers' Trainer in small runs: the tests need no torch.

Written by `python tests/trainer/recorded_runs.py` where torch and transformers are installed
(transformers 5.24.0 with torch 2.13.0 on a CPU). The runs have 10 updates, 5 in an epoch, and
metrics that follow from the number of updates, so that both sides decide by the same numbers.
"""

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent / "data" / "transformers.json"
ROWS, BATCH = 40, 8


class Run(NamedTuple):
    """Arguments of both Trainers, the metric after each update, and the evaluation sets' names."""

    arguments: dict[str, Any]
    scores: tuple[float, ...]
    sets: tuple[str, ...] = ()
    patience: tuple[int, float] | None = None


NAN = math.nan
RUNS = {
    "every second step, the best loaded": Run(
        dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
             logging_steps=3, load_best_model_at_end=True, metric_for_best_model="score",
             save_total_limit=2),
        (0, 0, 1, 0, 3, 0, 3, 0, 2, 0, 1),
    ),
    "only the best, of two sets, lower is better": Run(
        dict(eval_strategy="steps", eval_steps=1, save_strategy="best", logging_steps=4,
             metric_for_best_model="eval_b_score", greater_is_better=False, save_total_limit=2),
        (9, NAN, 5, 6, 5, 4, NAN, 4, 3, 8, 7),
        sets=("a", "b"),
    ),
    "only the best, by epoch, loaded": Run(
        dict(eval_strategy="epoch", save_strategy="best", logging_strategy="epoch",
             load_best_model_at_end=True, metric_for_best_model="score", save_total_limit=2),
        (0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 6),
    ),
    "small improvements end the run": Run(
        dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
             eval_on_start=True, logging_steps=2, load_best_model_at_end=True,
             metric_for_best_model="score"),
        (9, 1.0, 2.0, 2.5, 3.0, 5.0, 5.5, 6.0, 6.25, 8.0, 9.0),
        patience=(3, 0.75),
    ),
}  # fmt: skip


def arguments(run: Run, folder: str) -> dict[str, Any]:
    return dict(output_dir=folder, max_steps=10, learning_rate=0.01, disable_tqdm=True,
                report_to="none", **run.arguments)  # fmt: skip


def seen(trainer: Any, events: list[str], kept: list[int]) -> dict[str, Any]:
    """Returns what is compared of a run that has ended."""
    state = trainer.state
    best = state.best_model_checkpoint
    return {
        "logs": [[*log, log["step"]] for log in state.log_history],
        "events": events,
        "kept": sorted(kept),
        "steps": state.global_step,
        "best_metric": state.best_metric,
        "best_step": state.best_global_step,
        "best_checkpoint": None if best is None else int(re.findall(r"\d+$", best)[0]),
    }


def _recorded(run: Run) -> dict[str, Any]:
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(8, 4)

        def forward(self, x: Any, labels: Any) -> Any:
            logits = self.dense(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    events: list[str] = []

    def record(name: str) -> Any:
        return lambda self, *args, **kwargs: events.append(name)

    names = [x for x in vars(transformers.TrainerCallback) if x.startswith("on_")]
    recorder = type("Events", (transformers.TrainerCallback,), {n: record(n) for n in names})
    rows = [{"x": torch.ones(8) * i, "labels": i % 4} for i in range(ROWS)]
    held_out = rows[:16]
    callbacks: list[Any] = [recorder]
    if run.patience:
        callbacks.append(transformers.EarlyStoppingCallback(*run.patience))
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            Model(),
            transformers.TrainingArguments(
                **arguments(run, folder), per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=BATCH,
            ),
            train_dataset=rows,
            eval_dataset={name: held_out for name in run.sets} or held_out,
            compute_metrics=lambda given: {"score": run.scores[trainer.state.global_step]},
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        kept = [int(x.name.split("-")[1]) for x in Path(folder).glob("checkpoint-*")]
        return seen(trainer, events, kept)


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({name: _recorded(run) for name, run in RUNS.items()}) + "\n")
    print(FILE, FILE.stat().st_size)
