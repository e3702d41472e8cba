"""Logs, events and checkpoints of transformers' Trainer in small runs: the tests need no torch.

This file wrote them at the tag `before-the-cut` (commit 7c474e67), with transformers 5.24.0 and
torch 2.13.0 on a CPU. The runs have 10 updates, 5 in an epoch, and metrics that follow from the
number of updates, so that both sides decide by the same numbers.
"""

import math
import re
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
