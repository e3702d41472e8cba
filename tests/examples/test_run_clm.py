"""The main job from the command line, each run a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = ["--model", "tiny", "--batch-size", "8"]


def run(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.run_clm", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def text(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def steps_in(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/\d+  loss", output, re.M)]


def test_trains_resumes_and_knows_when_it_is_done(
    tmp_path: pathlib.Path, text: pathlib.Path
) -> None:
    out = tmp_path / "run"
    job = [*SMALL, "--text", text, "--out", out]

    first = run(*job, "--steps", 6, "--eval-every", 3)
    assert first.returncode == 0, first.stderr
    assert steps_in(first.stdout) == [1, 2, 3, 4, 5, 6]
    assert "Bytes on each of 8 devices, by stage" in first.stdout
    before, after = map(float, re.findall(r"held-out loss (\d.\d+) -> (\d.\d+)", first.stdout)[0])
    assert after < before
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")

    more = run(*job, "--steps", 9, "--eval-every", 3)
    assert more.returncode == 0, more.stderr
    assert "Continuing from step 6" in more.stdout
    assert steps_in(more.stdout) == [7, 8, 9]

    unbroken = run(*job[:-1], tmp_path / "unbroken", "--steps", 9, "--eval-every", 3)
    assert summary_losses(more.stdout) == summary_losses(unbroken.stdout)

    done = run(*job, "--steps", 9)
    assert done.returncode == 0
    assert "nothing to do" in done.stdout
    assert steps_in(done.stdout) == []

    other = run(*job, "--steps", 12, "--scan", "--seed", 1)
    assert other.returncode == 2
    assert "holds a checkpoint of another run" in other.stderr
    assert "model.scan: False there, True now" in other.stderr
    assert "seed: 0 there, 1 now" in other.stderr
    assert sorted(p.name for p in (out / "checkpoints").iterdir() if p.name.isdigit()) == ["6", "9"]

    again = run(*job, "--steps", 2, "--scan", "--remat", "--restart")
    assert again.returncode == 0, again.stderr
    assert steps_in(again.stdout) == [1, 2]


def summary_losses(output: str) -> list[str]:
    return re.findall(r"held-out loss (\d.\d+ -> \d.\d+)", output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "GARBAGE"], "NUL byte at offset 3"),
        (["--text", "missing.txt"], "missing.txt: no such file"),
        (["--model", "huge"], "--model huge is not known; there are tiny, mini"),
        (["--config", "missing.json"], "missing.json"),
        (["--batch-size", "9"], "use a multiple of 8"),
        (["--out", "GARBAGE"], "is a file"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(
    tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    garbage = tmp_path / "garbage.bin"
    garbage.write_bytes(b"abc\0def")
    filled = [str(garbage) if a == "GARBAGE" else a for a in arguments]
    job = run("--model", "tiny", "--out", tmp_path / "run", "--steps", 2, *filled)
    assert job.returncode == 2
    assert job.stderr.startswith("error: ")
    assert message in job.stderr
    assert "Traceback" not in job.stderr
    assert not (tmp_path / "run").exists()
