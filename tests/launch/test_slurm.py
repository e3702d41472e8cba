"""The batch script, and the same script in a shell whose srun, scancel and scontrol are files."""

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from groups import LIMIT, wait_for
from launch.launched import launched

from zerojax.launch.error import UsageError
from zerojax.launch.job import Job
from zerojax.launch.slurm import batch_script

JOB = Job(("train.py", "--name", "a b"))
CPU = {"JAX_PLATFORMS": "cpu"}


def sbatch_lines(script: str) -> list[str]:
    return [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_asks_for_what_the_processes_need() -> None:
    assert sbatch_lines(batch_script(JOB, 2, 8, "--partition=gpu --time=1:00:00", {})) == [
        *("--job-name=train.py", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"),
        *("--requeue", "--open-mode=append", "--signal=B:TERM@60"),
        *("--partition=gpu", "--time=1:00:00"),
    ]


def test_options_of_the_user_replace_those_for_gpus() -> None:
    assert "--gpus-per-node=8" not in sbatch_lines(batch_script(JOB, 2, 8, "--gres=gpu:8", {}))
    assert "--gpus-per-node=8" not in sbatch_lines(batch_script(JOB, 2, 8, "", CPU))


def test_the_processes_are_told_what_the_launcher_knows() -> None:
    script = batch_script(JOB._replace(watchdog="90"), 2, 1, "", {**CPU, "XLA_FLAGS": "--a --b"})
    assert "export JAX_PLATFORMS=cpu" in script
    assert "export XLA_FLAGS='--a --b'" in script
    assert "export ZEROJAX_WATCHDOG=90" in script
    assert "train.py --name 'a b' &" in script


@pytest.mark.parametrize("options", ["--comment='a", "-p gpu", "gpu"])
def test_options_that_are_none(options: str) -> None:
    with pytest.raises(UsageError, match="--slurm"):
        batch_script(JOB, 2, 8, options, {})


@pytest.mark.parametrize("odd", ["\n", "\u2028"])
def test_nothing_becomes_a_line_of_its_own(odd: str) -> None:
    for job, options in (
        (JOB, f"--comment='a{odd}rm -r .'"),
        (JOB._replace(script=(f"a{odd}rm -r .", "b")), ""),
        (JOB._replace(log_dir=Path(f"logs{odd}rm -r .")), ""),
    ):
        with pytest.raises(UsageError, match="unprintable"):
            batch_script(job, 2, 8, options, {})
    # Words of the script, and variables, are quoted.
    script = batch_script(JOB._replace(script=("a.py", f"b{odd}c")), 2, 8, "", {"XLA_FLAGS": odd})
    assert f"'b{odd}c'" in script


def test_each_job_has_a_token_which_the_script_does_not_show() -> None:
    script = batch_script(JOB, 2, 8, "", {"ZEROJAX_TOKEN": "secret"})
    assert "secret" not in script
    [line] = [line for line in script.splitlines() if "TOKEN" in line]
    shell = ["bash", "-c", f"{line}; echo $ZEROJAX_TOKEN"]
    tokens = [subprocess.run(shell, capture_output=True, text=True).stdout for _ in range(2)]
    assert len(set(tokens)) == 2
    assert all(len(token.strip()) == 32 for token in tokens)
    given = subprocess.run(shell, capture_output=True, env={"ZEROJAX_TOKEN": "mine"})
    assert given.stdout == b"mine\n"


def test_no_sbatch(tmp_path: Path) -> None:
    told = launched(tmp_path, "", "--slurm", "--partition=p", "--nproc-per-node", 2, PATH="/")
    assert told.status == 2
    assert "no sbatch here" in told.err
    assert "--dry-run" in told.err


def test_the_script_goes_to_sbatch_with_the_environment_of_the_user(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\ncat > submitted; echo ${XLA_PYTHON_CLIENT_PREALLOCATE-unset}\n")
    sbatch.chmod(stat.S_IRWXU)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = launched(tmp_path, "", "--slurm=-N2", "--nproc-per-node", 2, PATH=path)
    assert (told.status, told.out) == (0, "unset\n")
    assert "srun" in (tmp_path / "submitted").read_text()


def test_slurm_places_the_processes(tmp_path: Path) -> None:
    told = launched(tmp_path, "", "--slurm", "", "--node-rank", 1, "--nproc-per-node", 2)
    assert (told.status, "--slurm places the processes" in told.err) == (2, True)
    told = launched(tmp_path, "", "--slurm", "", "--dry-run")
    assert (told.status, "--slurm needs --nproc-per-node" in told.err) == (2, True)


class Shell:
    """The batch script of a job, with commands that note how they were called.

    ``srun`` runs ``task``, which has its number in $N; scancel signals the task.
    """

    def __init__(self, folder: Path, task: str, job: Job, state: str = "RUNNING") -> None:
        self.folder = folder
        called = 'echo "$0 $*" >> calls; exit 1'  # the status stands for a shell that Slurm ends
        commands = {
            "srun": f"n=$(cat n 2>/dev/null || echo 0); N=$((n + 1)); echo $N > n\n{task}",
            "scancel": 'echo "$0 $*" >> calls; kill -TERM $(cat task)',
            "scontrol": f"if [ $1 = show ]; then echo JobState={state}; else {called}; fi",
        }
        for name, text in commands.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(stat.S_IRWXU)
        script = batch_script(job, 1, 2, "", CPU)
        path = f"{folder}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={"PATH": path, "SLURM_JOB_ID": "7"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def calls(self) -> list[str]:
        """What was called besides srun, by name."""
        file = self.folder / "calls"
        return [Path(line).name for line in file.read_text().splitlines()] if file.exists() else []

    def end(self) -> tuple[int, str]:
        out = self.process.communicate(timeout=LIMIT)[0]
        return self.process.returncode, out


def test_status_75_queues_the_job_again(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "exit 75", JOB._replace(max_restarts=3))
    status, out = shell.end()
    assert status == 75
    assert "job 7 is queued again" in out
    assert shell.calls() == ["scontrol requeue 7"]


def test_a_notice_reaches_the_processes_which_save(tmp_path: Path) -> None:
    task = "echo $$ > task; trap 'sleep .3; exit 75' TERM; touch up; while :; do sleep .05; done"
    shell = Shell(tmp_path, task, JOB)
    wait_for((tmp_path / "up").exists, str)
    shell.process.send_signal(signal.SIGTERM)
    status, out = shell.end()
    assert status == 75
    assert "SIGTERM, passed to all processes" in out
    assert shell.calls() == ["scancel --signal=TERM 7", "scontrol requeue 7"]


def test_a_job_that_is_cancelled_is_not_queued_again(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "exit 75", JOB, state="COMPLETING")
    status, out = shell.end()
    assert (status, "queued again" in out, shell.calls()) == (75, False, [])


def test_failures_are_tried_again_as_often_as_allowed(tmp_path: Path) -> None:
    status, out = Shell(tmp_path, "exit $((N + 2))", JOB._replace(max_restarts=2)).end()
    assert status == 5
    assert "attempt 2 of 3, because of status 3" in out
    assert (tmp_path / "n").read_text() == "3\n"


def test_output_of_each_process_of_each_attempt_has_a_file(tmp_path: Path) -> None:
    logs = tmp_path / "the logs"
    job = JOB._replace(log_dir=logs, max_restarts=1)
    Shell(tmp_path, 'echo "$*" >> said; exit 1', job).end()
    said = (tmp_path / "said").read_text().splitlines()
    assert [f"--output={logs}/run-0.{n}/%t.log" in line for n, line in enumerate(said)] == [
        True
    ] * 2
    assert (logs / "run-0.1").is_dir()
