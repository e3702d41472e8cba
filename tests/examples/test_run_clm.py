"""The main job from the command line: in this process, and in others where they are killed."""

import gc
import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from groups import LIMIT, wait_for
from typer.testing import CliRunner, Result

from examples.run_clm.__main__ import app
from zerojax.checkpoint import PREEMPTED
from zerojax.checkpoint.saved import find

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = ["--config_name", "tiny", "--per_device_train_batch_size", "1"]

pytestmark = pytest.mark.usefixtures("quick_compile")


def run(*arguments: str | int | pathlib.Path) -> Result:
    runner = CliRunner(env={"COLUMNS": "120"})
    return runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def stopped(
    step: int, *signals: int, job: list[str | pathlib.Path], environment: dict[str, str]
) -> tuple[int, str]:
    """A process that gets signals as soon as it saves a step; its status and its output."""
    script = f"""
import os, runpy
from zerojax.checkpoint import Checkpointer, preemption
preemption._SAME = {LIMIT}  # instead of 5 s, which may pass between two signals
save = Checkpointer.save
def interrupted(self, step, *arguments, **options):
    save(self, step, *arguments, **options)
    for number in {[*map(int, signals)]} * (step == {step}):
        os.kill(os.getpid(), number)
Checkpointer.save = interrupted
runpy.run_module("examples.run_clm", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-c", script, *map(str, job)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


def parameters(out: pathlib.Path, step: int) -> dict[str, bytes]:
    saved = find(out / "checkpoints", step)
    return {leaf.name: saved.read(leaf.name).tobytes() for leaf in saved.arrays()}


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


def test_goes_on_from_a_model_cut_over_pairs(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    job = [*SMALL, "--text", text, "--eval_every", 2, "--output_dir"]
    pairs = ["--mesh", "data=4,model=2", "--per_device_train_batch_size", 2]
    cut = run(*job, tmp_path / "cut", "--max_train_steps", 2, *pairs)
    assert cut.exit_code == 0, cut.stderr
    assert "P('model', 'data')" in cut.stdout
    more = run(*job, tmp_path / "cut", "--max_train_steps", 4)
    assert more.exit_code == 0, more.stderr
    assert "Continuing from step 2" in more.stdout
    for arguments, message in [
        (["--mesh", "data=4,tensor=2"], "this job knows no axis 'tensor'"),
        (["--mesh", "data=1,model=8"], "n_head = 2 does not divide among the 8 devices"),
        (["--mesh", "data=4,model=2", "--kernels", "xla"], "the fused layers do not support"),
        (["--mesh", "data=8,model=2"], "multiply out to 16, not to devices=8"),
    ]:
        wrong = run(*job, tmp_path / "wrong", *arguments, "--max_train_steps", 4)
        assert wrong.exit_code == 2
        assert message in wrong.stderr.replace("\n", " ")


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
        (["--tokenizer_name", tmp_path / "none"], "none/tokenizer.json is not there"),
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


@pytest.mark.sweep
def test_killed_and_told_to_stop_it_ends_bit_for_bit_as_if_left_alone(
    tmp_path: pathlib.Path, text: pathlib.Path, environment: dict[str, str]
) -> None:
    common = [
        *SMALL,
        "--text",
        text,
        "--dropout",
        "0.2",
        "--max_train_steps",
        12,
        "--eval_every",
        6,
    ]
    unbroken = run(*common, "--save_every", 1, "--output_dir", tmp_path / "unbroken")
    assert unbroken.exit_code == 0, unbroken.stderr

    out = tmp_path / "run"
    job = [*common, "--save_every", 1, "--output_dir", out]
    status, _ = stopped(3, signal.SIGKILL, job=job, environment=environment)
    assert status == -signal.SIGKILL
    status, rest = stopped(6, signal.SIGTERM, job=job, environment=environment)
    assert status == PREEMPTED == 75
    saved, steps = map(int, re.findall(r"stopped by SIGTERM after (\d+)/(\d+) steps", rest)[0])
    assert 6 <= saved < steps == 12
    assert (out / "checkpoints" / str(saved)).is_dir()
    # Two in a short time are one notice.
    status, _ = stopped(saved + 1, signal.SIGTERM, signal.SIGTERM, job=job, environment=environment)
    assert status == PREEMPTED
    last = run(*job)
    assert last.exit_code == 0, last.stderr
    assert summary_losses(last.stdout) == summary_losses(unbroken.stdout)
    assert parameters(out, 12) == parameters(tmp_path / "unbroken", 12)

    # Half the devices, another stage, from the step before the last: to rounding.
    elsewhere = ["--devices", "4", "--config", REPOSITORY / "configs" / "zero1.json"]
    elsewhere += ["--per_device_train_batch_size", "2"]
    command = ["-m", "examples.run_clm", *map(str, job), *elsewhere, "--from_step", "11"]
    subprocess.run([sys.executable, *command], env=environment, check=True)
    a, b = parameters(out, 12), parameters(tmp_path / "unbroken", 12)
    for name in a:
        if name.startswith("params"):
            np.testing.assert_allclose(
                np.frombuffer(a[name], np.float32), np.frombuffer(b[name], np.float32), atol=1e-5
            )


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(
    tmp_path: pathlib.Path, text: pathlib.Path, trained: Trained
) -> None:
    out = shutil.copytree(trained.folder, tmp_path / "run")
    job = [*SMALL, "--text", text, "--output_dir", out, "--eval_every", 2]
    largest = max((out / "checkpoints" / "6").rglob("d/*"), key=lambda file: file.stat().st_size)
    whole = bytearray(largest.read_bytes())
    whole[len(whole) // 2] ^= 1
    largest.write_bytes(whole)

    damaged = run(*job, "--max_train_steps", 7)
    assert damaged.exit_code == 2
    assert str(largest) in damaged.stderr
    assert "--from_step 4 goes on from there" in damaged.stderr
    good = run(*job, "--max_train_steps", 5, "--from_step", 4)
    assert good.exit_code == 0, good.stderr
    assert steps_in(good.stdout) == [5]


def test_offloaded_it_goes_on_from_any_place(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    """From the disk to the devices, and from there to host memory, as if nothing had moved."""
    job = [*SMALL, "--scan", "--text", text, "--output_dir", tmp_path / "run", "--eval_every", 3]
    ready, nvme = REPOSITORY / "configs", tmp_path / "nvme.json"
    nvme.write_text((ready / "zero3_nvme.json").read_text().replace("/local_nvme", str(tmp_path)))
    rates = []
    for i, config in enumerate([nvme, ready / "zero3_bf16.json", ready / "zero3_offload.json"]):
        done = run(*job, "--max_train_steps", 2 * i + 2, "--config", config)
        assert done.exit_code == 0, done.stderr
        assert steps_in(done.stdout) == [2 * i + 1, 2 * i + 2]
        assert (f"Continuing from step {2 * i}" in done.stdout) == (i > 0)
        assert ("of disk for each" in done.stdout) == (i == 0)
        assert ("host memory, for each device" in done.stdout) == (i != 1)
        rates += re.findall(r" lr (\S+) ", done.stdout)
    # The warm-up counts on.
    assert rates == ["0", "0", "5e-05", "0.0001", "0.00015", "0.0002"]

    def removed() -> bool:
        gc.collect()  # does nothing while another thread collects
        return not [*tmp_path.glob("zerojax-*")]

    wait_for(removed, str)


def test_a_disk_that_is_not_there(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    config = REPOSITORY / "configs" / "zero3_nvme.json"
    job = run(
        *SMALL, "--text", text, "--output_dir", tmp_path, "--max_train_steps", 1, "--config", config
    )
    assert job.exit_code == 2
    assert job.stderr == (
        "error: nvme_path /local_nvme is not there: make the folder, or mount the disk first\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "GARBAGE"], "NUL byte at offset 3"),
        (["--text", "missing.txt"], "missing.txt: no such file"),
        (["--config_name", "huge"], "--config_name huge is not known; there are tiny, mini"),
        (["--config", "missing.json"], "missing.json"),
        (
            ["--config", "CONFIG", "--per_device_train_batch_size", "3"],
            "makes 24 rows an update on 8",
        ),
        (["--output_dir", "GARBAGE"], "is a file"),
        (["--report_to", "csv"], "--report_to csv goes with --with_tracking"),
        (["--dataset_config_name", "x"], "goes with --dataset_name"),
        (["--num_train_epochs", "1", "--block_size", "128", "--text", "SHORT"], "fewer blocks of"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(
    tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    garbage = tmp_path / "garbage.bin"
    garbage.write_bytes(b"abc\0def")
    fixed = tmp_path / "fixed.json"
    fixed.write_text('{"train_batch_size": 16}')
    short = tmp_path / "short.txt"
    short.write_text("to be or not to be " * 100)
    files = {"SHORT": str(short), "GARBAGE": str(garbage), "CONFIG": str(fixed)}
    filled = [files.get(a, a) for a in arguments]
    job = run(
        "--config_name", "tiny", "--output_dir", tmp_path / "run", "--max_train_steps", 2, *filled
    )
    assert job.exit_code == 2
    assert job.stderr.startswith("error: ")
    assert message in job.stderr
    assert "Traceback" not in job.stderr
    assert not (tmp_path / "run").exists()
