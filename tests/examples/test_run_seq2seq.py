"""The encoder-decoder from the command line: files in, a folder out, and what is refused."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner, Result

from examples.run_seq2seq import model as models
from examples.run_seq2seq.__main__ import app
from examples.run_seq2seq.model import MINI, Source
from examples.run_seq2seq.tokens import trained
from zerojax.models.bart import Bart, BartConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = BartConfig(**MINI | dict(vocab_size=272, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32))
PAIRS = [(f"it rains in may {i}", f"It rains in May, {i}.") for i in range(24)]
SHORT = ["--max_train_steps", 3, "--per_device_train_batch_size", 1, "--num_beams", 2]
SHORT += ["--per_device_eval_batch_size", 1, "--max_target_length", 16, "--num_warmup_steps", 1]


def run(*arguments: str | int | float | pathlib.Path) -> Result:
    runner = CliRunner(env={"COLUMNS": "120"})
    return runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """transformers' form of a BlenderBot of random weights, with its tokenizer."""
    folder, some = tmp_path_factory.mktemp("bot"), jnp.ones((1, 8), jnp.int32)
    params = jax.jit(Bart(TINY).init)(jax.random.key(0), some, some)["params"]
    tokenizer = trained((text for pair in PAIRS for text in pair), TINY)
    models.save(folder, params, Source(TINY, tokenizer, None))
    return folder


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[str | pathlib.Path]:
    """Rows to train on and to hold out; 11 do not divide among 8 devices."""
    rows = [{"x": source, "y": target} for source, target in PAIRS]
    train, unseen = tmp_path / "train.jsonl", tmp_path / "unseen.csv"
    train.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    unseen.write_text("x,y\n" + "".join(f'{row["x"]},"{row["y"]}"\n' for row in rows[:11]))
    columns = ["--source_column", "x", "--target_column", "y", "--source_prefix", "bot: "]
    return ["--train_file", train, "--validation_file", unseen, *columns]


def report_of(out: pathlib.Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def test_from_a_folder_to_a_folder(
    tmp_path: pathlib.Path, folder: pathlib.Path, files: list[Any]
) -> None:
    some = ["--n_val", 9, "--val_max_target_length", 4, "--pad_to_max_length"]
    first = run(
        "--model_name_or_path", folder, *files, *SHORT, *some, "--output_dir", tmp_path / "a"
    )
    assert first.exit_code == 0, first.stderr
    assert "BLEU" in first.stdout
    assert len((tmp_path / "a" / "targets.txt").read_text().split("\n")) == 9 + 1
    assert {file.name for file in (tmp_path / "a" / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip

    more = run(
        "--model_name_or_path",
        tmp_path / "a" / "model",
        *files,
        *SHORT,
        "--output_dir",
        tmp_path / "b",
    )
    assert more.exit_code == 0, more.stderr
    losses = [report_of(tmp_path / name)["losses"] for name in "ab"]
    assert len(losses[0]) == 3
    assert losses[1][0] < losses[0][0]  # the same rows, after what the first run learned
