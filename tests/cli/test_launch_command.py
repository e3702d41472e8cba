"""`zerojax launch`: what is refused before any work, what would be started, and how soon."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launched import environment
from typer.testing import CliRunner, Result

from zerojax.__main__ import app

HOSTS = "worker-0 slots=2\nworker-1 slots=4\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and a hostfile, on a machine without GPUs and without mpirun."""
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    (tmp_path / "hosts").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    return tmp_path


def launch(words: str, **environ: str) -> Result:
    given = environment(JAX_PLATFORMS="", PYTHONPATH="/ours", WANDB_API_KEY="secret")
    return CliRunner().invoke(app, ["launch", *shlex.split(words)], obj={**given, **environ})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("none.py", "no script none.py in /"),
        ("''", "no script '' in /"),
        ("x" * 5000, f"no script {'x' * 200} in /"),
        ("--hostfile hosts --nproc-per-node 3 train.py", "worker-0 has 2 slots"),
        ("--num-nodes 2 train.py", "several machines need --hostfile, or --node-rank"),
        (
            "--num-nodes 2 --node-rank 0 --coordinator a:1 --max-restarts 1 train.py",
            "excludes --node-rank",
        ),
        ("--nproc-per-node 99999 train.py", "--nproc-per-node 99999: "),
        ("--include localhost:0 train.py", "need GPUs here"),
        ("--slurm='' --nproc-per-node 2 train.py", "no sbatch here"),
    ],
)
def test_errors_before_any_work(words: str, says: str) -> None:
    result = launch(words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("zerojax launch: ")
    assert not result.stdout


def test_more_processes_than_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a, 00000000:1B:00.0\n1, GPU-b, 00000000:1C:00.0'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    result = launch("--nproc-per-node 4 train.py")
    assert result.exit_code == 2
    assert "4 processes do not fit 2 GPUs" in result.stderr
    shown = launch("--dry-run train.py").stdout
    heads = [line.partition(";")[0] for line in shown.splitlines()[::2]]
    assert heads == ["# process 0: GPU 0", "# process 1: GPU 1"]
    assert " CUDA_VISIBLE_DEVICES=1 " in shown.splitlines()[3]
    assert "JAX_PLATFORMS" not in shown
    assert "all GPUs" in launch("--dry-run --nproc-per-node 1 train.py").stdout
    chosen = launch("--dry-run --include localhost:1 train.py").stdout
    assert "CUDA_VISIBLE_DEVICES=1 " in chosen
    assert chosen.count("\n") == 2


@pytest.mark.usefixtures("folder")
def test_dry_run_of_one_machine() -> None:
    shown = launch(
        "--nproc-per-node 2 --dry-run --watchdog off train.py --lr 3"
    ).stdout.splitlines()
    assert shown[2].startswith("# process 1: CPU")
    words = shlex.split(shown[3])
    assert words[-3:] == ["train.py", "--lr", "3"]
    assert {"ZEROJAX_PROCESS_ID=1", "ZEROJAX_WATCHDOG=off", "JAX_PLATFORMS=cpu"} < set(words)


@pytest.mark.parametrize("words", ["--dry-run", ""])
def test_without_mpirun_the_commands_are_printed(folder: Path, words: str) -> None:
    result = launch(f"--hostfile hosts --exclude worker-1:0,2 --log-dir logs {words} train.py -x")
    assert result.exit_code == (0 if words else 2)
    assert "mpirun is not installed; start each host's part there" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[::2] == ["# worker-0:", "# worker-1:"]
    for rank, line in enumerate(lines[1::2]):
        assert line.startswith(f"cd {folder} && env ")
        given = shlex.split(line)
        assert f"CUDA_VISIBLE_DEVICES={('0,1', '1,3')[rank]}" in given
        assert "PYTHONPATH=/ours" in given
        assert "secret" not in line
        options = given[given.index("launch") + 1 :]
        assert options[:6] == f"--num-nodes 2 --node-rank {rank} --nproc-per-node 2,2".split()
        assert options[6] == "--coordinator"
        assert options[7].startswith("worker-0:")
        assert options[-4:] == ["--log-dir", str(folder / "logs"), "train.py", "-x"]


def test_one_machine_s_part(folder: Path) -> None:
    words = "--hostfile hosts --node-rank 1 --coordinator worker-0:1234 --dry-run train.py"
    shown = launch(words, JAX_PLATFORMS="cpu").stdout.splitlines()
    assert [line.split(":")[0] for line in shown[::2]] == [f"# process {i}" for i in range(2, 6)]
    assert "ZEROJAX_COORDINATOR=worker-0:1234 ZEROJAX_NUM_PROCESSES=6" in shown[1]
    assert "ZEROJAX_LOCAL_PROCESSES=4 ZEROJAX_LOCAL_PROCESS_ID=0" in shown[1]


@pytest.mark.slow
def test_it_starts_without_jax() -> None:
    code = (
        "import sys; from zerojax.__main__ import app; import zerojax.cli.launch; "
        "sys.exit(bool({'jax', 'numpy', 'rich'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
