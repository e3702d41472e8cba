"""The examples, the main job and the commands as several processes: the same numbers, said once."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from groups import LIMIT
from promised import EXAMPLES, numbered, promised
from typer.testing import CliRunner

from examples.run_clm.__main__ import app
from zerojax.launch.job import free_port

JOB = ["-m", "examples.run_clm", "--config_name", "tiny"]
JOB += ["--max_train_steps", "4", "--eval_every", "2"]


class Said(NamedTuple):
    """What processes printed, without what gloo prints itself."""

    first: list[str]
    others: list[str]


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[..., Said]:
    """Runs a command in so many processes, as torchrun would, on four devices in all."""

    def run(count: int, *command: str | Path) -> Said:
        port = free_port()
        common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "localhost"}
        common |= {"MASTER_PORT": port, "JAX_NUM_CPU_DEVICES": 4 // count}
        started = [
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                env=environment
                | {name: str(x) for name, x in {**common, "RANK": i, "LOCAL_RANK": i}.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(count)
        ]
        said: list[list[str]] = []
        for process in started:
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, err
            gloo = re.compile(r"\[Gloo\]|peer ranks")
            said.append([x for x in out.splitlines() if x.strip() and not gloo.search(x)])
        return Said(said[0], [line for each in said[1:] for line in each])

    return run


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("evaluate", 2, marks=pytest.mark.sweep),
        pytest.param("minimal", 4, marks=pytest.mark.sweep),
        pytest.param("minimal_nnx", 2, marks=pytest.mark.sweep),
        pytest.param("resume", 4, marks=pytest.mark.sweep),
    ],
)
def test_an_example(count: int, name: str, tmp_path: Path, run: Callable[..., Said]) -> None:
    path = EXAMPLES / f"{name}.py"
    said = run(count, path, tmp_path)
    words, number = numbered(said.first[-1])
    assert words == promised(path)[0]
    assert number == pytest.approx(promised(path)[1], abs=0.02)
    assert said.others == []


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_main_job(count: int, tmp_path: Path, run: Callable[..., Said]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    job = [*JOB, "--text", str(text), "--output_dir"]
    said = run(count, *job, tmp_path / "several")
    alone = CliRunner().invoke(app, [*job[2:], str(tmp_path / "one")]).stdout.splitlines()
    assert said.others == []
    assert losses(said.first) == losses(alone)
    assert len(losses(said.first)) == 4
    assert (tmp_path / "several" / "loss.png").exists()


def losses(lines: list[str]) -> list[str]:
    return [match[0] for line in lines if (match := re.match(r"step +\d+/\d+  loss \S+", line))]


@pytest.mark.sweep
def test_the_commands(run: Callable[..., Said]) -> None:
    count = 4
    report = run(count, "-m", "zerojax", "report")
    assert any(f"{count} of them, this is number 0" in line for line in report.first)
    explained = run(count, "-m", "zerojax", "explain", "configs/zero3.json")
    assert "zero_optimization.stage" in "\n".join(explained.first)
    assert report.others == explained.others == []
