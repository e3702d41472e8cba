"""The command lines of the article on Accelerate and DeepSpeed, and what they refuse."""

import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import zerojax
from examples.run_clm.__main__ import app as clm
from examples.run_clm.data import read_text
from examples.run_clm.job import Job
from examples.run_glue.__main__ import app as glue
from examples.run_glue.data import Pair, classes
from examples.run_seq2seq.__main__ import app as seq2seq
from examples.run_seq2seq.options import Options

COMMON = "--learning_rate 5e-4 --num_train_epochs 1 --per_device_train_batch_size 16 "
COMMON += "--output_dir out --with_tracking --report_to wandb "
CLASSIFICATION = COMMON + "--model_name_or_path deberta/ --task_name mrpc --max_length 128 "
CLASSIFICATION += "--ignore_mismatched_sizes"
TRANSLATION = (
    COMMON
    + """--dataset_name chats --max_source_length 128 --source_prefix "chatbot: " --num_beams 10
    --max_target_length 64 --val_max_target_length 64 --val_min_target_length 20 --n_train 10000
    --n_val 1000 --pad_to_max_length --per_device_eval_batch_size 100 --weight_decay 0.0
    --num_warmup_steps 100 --model_name_or_path blenderbot/ --seed 25"""
)
GENERATION = COMMON + "--config_name gpt2-xl --tokenizer_name gpt2-xl --dataset_name wikitext "
GENERATION += "--dataset_config_name wikitext-2-raw-v1 --block_size 128 "
GENERATION += "--per_device_eval_batch_size 16"


@pytest.mark.parametrize(
    ("app", "line"),
    [(glue, CLASSIFICATION), (seq2seq, TRANSLATION), (clm, GENERATION)],
    ids=["glue", "seq2seq", "clm"],
)
def test_the_options_of_the_article(app: typer.Typer, line: str) -> None:
    given = shlex.split(line)
    read: dict[str, Any] = typer.main.get_command(app).make_context("run", [*given]).params
    for option, value in zip(given, [*given[1:], "--"], strict=True):
        if option.startswith("--"):
            found = read[option.removeprefix("--")]
            assert found == (True if value.startswith("--") else type(found)(value))


@pytest.mark.parametrize(
    ("option", "meant"),
    [("--max_lenght", "--max_length"), ("--max-length", "--max_length"), ("--epochs", "")],
)
def test_an_unknown_option_is_an_error(option: str, meant: str) -> None:
    wrong = CliRunner(env={"COLUMNS": "200"}).invoke(glue, [option, "1"])
    assert wrong.exit_code == 2
    assert f"No such option: {option}" in wrong.stderr
    assert meant in wrong.stderr


def refused_text() -> object:
    Path("garbage.bin").write_bytes(b"abc\0def")
    return read_text("garbage.bin")


def refused_rows() -> object:
    job: Any = SimpleNamespace(per_device_train_batch_size=3, config="zero.json")
    return Job.rows(job, zerojax.zero(train_batch_size=16).config, 8)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (refused_text, "garbage.bin is not text: NUL byte at offset 3"),
        (refused_rows, "makes 24 rows an update on 8 devices, but zero.json says 16"),
        (
            lambda: classes([Pair("a", "b", label) for label in (0, 2)]),
            "the labels are 0, 2: number them from 0 to 1",
        ),
        (
            lambda: Options(
                **dict.fromkeys(Options.__dataclass_fields__) | {"train_file": "a.csv"}
            ),
            "give --train_file and --validation_file",
        ),
    ],
)
def test_what_is_refused(
    run: Callable[[], object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        run()
