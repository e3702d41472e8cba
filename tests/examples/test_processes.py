"""The examples, the main job and the commands as several processes: the same numbers, said once."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from groups import LIMIT
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


def test_the_main_job(tmp_path: Path, run: Callable[..., Said]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    job = [*JOB, "--text", str(text), "--output_dir"]
    said = run(2, *job, tmp_path / "several")
    alone = CliRunner().invoke(app, [*job[2:], str(tmp_path / "one")]).stdout.splitlines()
    assert said.others == []
    assert losses(said.first) == losses(alone)
    assert len(losses(said.first)) == 4
    assert (tmp_path / "several" / "loss.png").exists()


def losses(lines: list[str]) -> list[str]:
    return [match[0] for line in lines if (match := re.match(r"step +\d+/\d+  loss \S+", line))]
