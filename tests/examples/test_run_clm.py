"""The main job from the command line: in this process, and in others where they are killed."""

import json
import math
import pathlib
import re
import shutil
from typing import NamedTuple

import pytest
from typer.testing import CliRunner, Result

from examples.run_clm.__main__ import app

SMALL = ["--config_name", "tiny", "--per_device_train_batch_size", "1"]

pytestmark = pytest.mark.usefixtures("quick_compile")


def run(*arguments: str | int | pathlib.Path) -> Result:
    runner = CliRunner(env={"COLUMNS": "120"})
    return runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


class Trained(NamedTuple):
    """A run of six steps, saved and evaluated after each second."""

    folder: pathlib.Path
    result: Result


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, text: pathlib.Path, quick_compile: None
) -> Trained:
    folder = tmp_path_factory.mktemp("trained") / "run"
    job = [*SMALL, "--text", text, "--output_dir", folder, "--eval_every", 2]
    result = run(*job, "--max_train_steps", 6)
    assert result.exit_code == 0, result.stderr
    return Trained(folder, result)


def steps_in(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/\d+  loss", output, re.M)]


def test_trains_resumes_and_knows_when_it_is_done(
    tmp_path: pathlib.Path, text: pathlib.Path, trained: Trained
) -> None:
    first = trained.result
    assert steps_in(first.stdout) == [1, 2, 3, 4, 5, 6]
    assert "Bytes on each of 8 devices, by stage" in first.stdout
    before, after = map(float, re.findall(r"held-out loss (\d.\d+) -> (\d.\d+)", first.stdout)[0])
    assert after < before
    assert first.stdout.endswith(f"examples.generate --run {trained.folder} --prompt 'import '\n")
    assert (trained.folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    out = shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "6")
    job = [*SMALL, "--text", text, "--output_dir", out]
    more = run(*job, "--max_train_steps", 6, "--eval_every", 2)
    assert more.exit_code == 0, more.stderr
    assert "Continuing from step 4" in more.stdout
    assert steps_in(more.stdout) == [5, 6]

    assert summary_losses(more.stdout) == summary_losses(first.stdout)

    done = run(*job, "--max_train_steps", 6)
    assert done.exit_code == 0
    assert "nothing to do" in done.stdout
    assert steps_in(done.stdout) == []

    other = run(*job, "--max_train_steps", 12, "--scan", "--seed", 1)
    assert other.exit_code == 2
    assert "holds a checkpoint of another run" in other.stderr
    assert "model.scan: False there, True now" in other.stderr
    assert "seed: 0 there, 1 now" in other.stderr
    assert sorted(p.name for p in (out / "checkpoints").iterdir() if p.name.isdigit()) == ["4", "6"]


def test_tokens_of_a_tokenizer(
    tmp_path: pathlib.Path, text: pathlib.Path, trained: Trained
) -> None:
    """They are part of what a run goes on from, and have to fit the model; another run in its
    folder begins anew when it is told to."""
    library = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {word: i for i, word in enumerate(["?", *text.read_text().split()[:9]])}
    words |= {"dog": len(words)} if "dog" not in words else {}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    merges = tmp_path / "vocab.bpe"
    merges.write_text("#version: 0.2\nt h\nth e\n")
    out = shutil.copytree(trained.folder, tmp_path / "run")
    job = [*SMALL, "--text", text, "--output_dir", out, "--block_size", 16, "--scan", "--remat"]

    anew = ["--tokenizer_name", tmp_path, "--max_train_steps", 2, "--eval_every", 2, "--restart"]
    done = run(*job, *anew)
    assert done.exit_code == 0, done.stderr
    assert steps_in(done.stdout) == [1, 2]
    loss, perplexity = map(float, re.findall(r"-> (\S+) \| perplexity (\S+)", done.stdout)[0])
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    for arguments, message in [
        ([], "text: 1620 tokens, sha256"),
        (["--tokenizer_name", merges], "beyond vocab_size = 256"),
        (
            ["--tokenizer_name", tmp_path, "--block_size", 500],
            "1620 tokens to train on and 180 held out",
        ),
    ]:
        wrong = run(*job, *arguments, "--max_train_steps", 4)
        assert wrong.exit_code == 2
        assert message in wrong.stderr


def test_epochs_of_a_folder_with_figures(tmp_path: pathlib.Path) -> None:
    """A folder as `datasets` splits it; an epoch has 5 updates, and an evaluation 2 batches."""
    folder, out = tmp_path / "words" / "small", tmp_path / "run"
    folder.mkdir(parents=True)
    for name, count in (("train", 5), ("validation", 2)):
        rows = [{"text": "to be or not " * 10}] * (count * 8 * 32 // 130 + 1) + [{"text": ""}]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = [*SMALL, "--dataset_name", tmp_path / "words", "--dataset_config_name", "small"]
    job += ["--block_size", 32, "--num_train_epochs", 1, "--per_device_eval_batch_size", 2]
    done = run(*job, "--output_dir", out, "--with_tracking", "--report_to", "csv")
    assert done.exit_code == 0, done.stderr
    assert steps_in(done.stdout) == [1, 2, 3, 4, 5]
    losses = (out / "logs" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in losses[:5]] == ["step", "8", "16", "24", "32"]

    other = run(*job[:-4], "--output_dir", out, "--max_train_steps", 9)
    assert "each block once an epoch there, " in other.stderr.replace("\n", " ")


def summary_losses(output: str) -> list[str]:
    return re.findall(r"held-out loss (\d.\d+ -> \d.\d+)", output)
