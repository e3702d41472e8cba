"""Pairs of sentences classified, from the command line in this process."""

import json
import pathlib
import re

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from examples.run_glue.__main__ import app

GUIDE = """
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: fp16
num_processes: 2
"""

pytestmark = pytest.mark.usefixtures("quick_compile")


def run(*arguments: str | int | pathlib.Path) -> Result:
    runner = CliRunner(env={"COLUMNS": "120"})
    return runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def rows(count: int) -> list[dict[str, str | int]]:
    """Pairs whose second sentence tells the label."""
    rng = np.random.default_rng(0)
    firsts, seconds = ("to be or", "not to be"), ("abc abc", "xyz xyz")
    return [
        {"sentence1": firsts[i], "sentence2": seconds[label], "label": int(label)}
        for i, label in rng.integers(2, size=(count, 2))
    ]


def written(path: pathlib.Path, made: list[dict[str, str | int]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def scores(output: str) -> list[str]:
    return re.findall(r"accuracy (\d\.\d+)", output)


def test_it_learns_saves_and_reads_what_it_saved(tmp_path: pathlib.Path) -> None:
    """From Accelerate's YAML, with 27 rows to evaluate on 8 devices."""
    (tmp_path / "a.yaml").write_text(GUIDE)
    train_file, out = written(tmp_path / "a.jsonl", rows(270)), tmp_path / "out"
    common = ["--config", tmp_path / "a.yaml", "--train_file", train_file, "--max_length", 48]
    tiny = [
        "--model_name_or_path",
        "deberta-tiny",
        "--learning_rate",
        5e-3,
        "--num_train_epochs",
        4,
    ]
    first = run(*common, *tiny, "--output_dir", out)
    assert first.exit_code == 0, first.stderr
    assert "243 pairs to train on, 27 held out, 2 labels; 0 cut" in first.stdout
    assert float(scores(first.stdout)[-1]) > 0.9  # chance is under 0.65
    again = run(*common, "--model_name_or_path", out, "--num_train_epochs", 0)
    assert again.exit_code == 0, again.stderr
    assert scores(again.stdout)[0] == scores(first.stdout)[-1]

    written(train_file, [row | {"label": i % 3} for i, row in enumerate(rows(90))])
    other = run(*common, "--model_name_or_path", out)
    assert other.exit_code == 2
    assert "classifier.weight [2, 32], not [3, 32]" in other.stderr
    new = ["--num_train_epochs", 0, "--ignore_mismatched_sizes", "--pad_to_max_length"]
    other = run(*common, "--model_name_or_path", out, *new, "--per_device_eval_batch_size", 1)
    assert other.exit_code == 0, other.stderr
    assert "81 pairs to train on, 9 held out, 3 labels" in other.stdout
    written(train_file, rows(90))
    config = json.loads((out / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 20}, "does not fit the model"),
        ({"position_biased_input": True}, "has positions for 32 tokens"),
    ):
        (out / "config.json").write_text(json.dumps(config | change))
        other = run(*common, "--model_name_or_path", out)
        assert other.exit_code == 2
        assert message in other.stderr
