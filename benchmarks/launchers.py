"""Real runs under Slurm and Ray: what is killed, how long the end takes, and what comes out.

    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge    # 12 s
    python -m benchmarks.launchers slurm --record benchmarks/records    # as root; 2 minutes
    pip install 'zerojax[ray]'                                          # Python 3.12; 81 s
    python -m benchmarks.launchers ray --record benchmarks/records      # 3 minutes

Two processes on the CPU train for 60 steps (benchmarks/launch_training.py). Slurm's daemons are
stood up here, for two nodes that are this machine; n1 and n2 are added to /etc/hosts for that time.
"""

import argparse
import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import console, console_table, heading, markdown_table

STEPS = 60
HEAD = ("run", "what was killed", "to the end of all processes", "what came out")


class Run(NamedTuple):
    """One run.

    Attributes:
      name: The options of the launch.
      killed: What happened to the run.
      seconds: From there until no process of the first attempt was left; nan where nothing did.
      said: What came out.
      checksum: Of the parameters at the end; "" where the run did not reach the end.
    """

    name: str
    killed: str
    seconds: float
    said: str
    checksum: str

    def row(self) -> tuple[str, ...]:
        seconds = "" if self.seconds != self.seconds else f"{self.seconds:.1f} s"
        end = f"parameters {self.checksum}" if self.checksum else "no end"
        return self.name, self.killed, seconds, f"{self.said}; {end}"


class Output:
    """What a run writes into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def text(self) -> str:
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def wait(self, pattern: str, count: int = 1, seconds: float = 180.0) -> list[str]:
        """The first group of each match, as soon as there are as many."""
        until = time.monotonic() + seconds
        while len(found := re.findall(pattern, self.text())) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"no {pattern!r} in\n{self.text()}")
            time.sleep(0.05)
        return found

    def checksum(self) -> str:
        ends = set(re.findall(r"end: (\w+)", self.text()))
        return ends.pop() if len(ends) == 1 else ""


def training(folder: Path) -> list[str]:
    program = ["-m", "benchmarks.launch_training", str(folder / "checkpoints")]
    return [*program, "--steps", str(STEPS), "--pause", "0.2"]


def seconds_until_gone(pids: list[str]) -> float:
    start = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return time.monotonic() - start


def slurm_runs(folder: Path) -> list[Run]:
    """Undisturbed, a notice of the time limit, a killed task, and a user's scancel."""

    def start(name: str, *options: str) -> tuple[str, Output]:
        (folder / name).mkdir()
        output = Output(folder / name / "out")
        sbatch = f"--output={output.path} --time=30"
        nodes = ("--num-nodes", "2", "--nproc-per-node", "1")
        words = ["launch", "--slurm", sbatch, *nodes, *options, *training(folder / name)]
        told = subprocess.run(
            [sys.executable, "-m", "zerojax", *words], check=True, capture_output=True, text=True
        )
        return told.stdout.split()[-1], output

    def control(*words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def state(job: str) -> str:
        found = re.search(r"JobState=(\w+)", control("scontrol", "show", "job", job))
        return found[1] if found else "gone"

    def wait_for(job: str, *states: str) -> str:
        until = time.monotonic() + 120
        while (now := state(job)) not in states and time.monotonic() < until:
            time.sleep(0.1)
        return now

    def disturbed(
        name: str, killed: str, disturb: Callable[[str, list[str]], object], *options: str
    ) -> tuple[str, Output, float]:
        job, output = start(name, *options)
        output.wait(r"step (20) ", 2)
        pids = output.wait(r"pid (\d+) is", 2)
        disturb(job, pids)
        return job, output, seconds_until_gone(pids)

    runs = []
    options = "--slurm, 2 nodes"
    job, output = start("alone")
    output.wait("end: ", 2)
    said = f"job {wait_for(job, 'COMPLETED', 'FAILED')}"
    runs.append(Run(options, "nothing", float("nan"), said, output.checksum()))

    job, output, seconds = disturbed(
        "term",
        "",
        lambda job, _: control("scancel", "--batch", "--signal=TERM", job),
    )
    output.wait("is queued (again)")
    saved = output.wait(r"saved step (\d+), preempted", 2)
    wait_for(job, "PENDING")
    until = time.monotonic() + 60
    while state(job) == "PENDING" and time.monotonic() < until:  # for two minutes otherwise
        control("scontrol", "update", f"jobid={job}", "StartTime=now")
        time.sleep(0.5)
    output.wait("end: ", 2)
    said = f"saved step {', '.join(sorted(set(saved)))}, status 75, requeued, went on"
    said += f", job {wait_for(job, 'COMPLETED', 'FAILED')}"
    killed = "SIGTERM to the batch shell after step 20, as `--signal=B:TERM@60` sends it"
    runs.append(Run(options, killed, seconds, said, output.checksum()))

    job, output, seconds = disturbed(
        "kill",
        "",
        lambda _, pids: os.kill(int(pids[1]), signal.SIGKILL),
        "--max-restarts",
        "1",
    )
    output.wait("end: ", 2)
    said = f"{output.wait('(attempt 2 of 2.*)')[0]}, went on after the last save"
    said += f", job {wait_for(job, 'COMPLETED', 'FAILED')}"
    killed = "SIGKILL of one task after step 20"
    runs.append(Run(f"{options} --max-restarts 1", killed, seconds, said, output.checksum()))

    job, output, seconds = disturbed("cancel", "", lambda job, _: control("scancel", job))
    time.sleep(3)
    said = f"job {wait_for(job, 'CANCELLED', 'COMPLETED', 'FAILED')}, not queued again"
    runs.append(Run(options, "scancel by the user", seconds, said, output.checksum()))
    return runs


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Slurm's daemons, and the names of its nodes."""
    address = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    hosts.write_text(f"{before.rstrip()}\n{address.stdout.split()[0]} n1 n2\n")
    up = Path(__file__).with_name("slurm_up.sh")
    try:
        subprocess.run(["bash", str(up), str(folder)], check=True)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield
    finally:
        hosts.write_text(before)
        for pid in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid.read_text()), signal.SIGTERM)


def ray_runs(folder: Path) -> list[Run]:
    """Undisturbed, and a killed process."""
    runs = []
    for name, restarts in (("alone", 0), ("kill", 1)):
        (folder / name).mkdir()
        output = Output(folder / name / "out")
        options = ["--ray", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
        words = [sys.executable, "-m", "zerojax", "launch", *options, *training(folder / name)]
        with output.path.open("w") as out:
            start = time.monotonic()
            launch = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
            killed, seconds = "nothing", float("nan")
            if restarts:
                output.wait(r"step (20) ", 2)
                pids = output.wait(r"pid (\d+) is", 2)
                os.kill(int(pids[1]), signal.SIGKILL)
                killed, seconds = "SIGKILL of one process after step 20", seconds_until_gone(pids)
            status = launch.wait()
        said = f"status {status} {time.monotonic() - start:.0f} s after the command"
        runs.append(Run(" ".join(options), killed, seconds, said, output.checksum()))
        if status:
            print(output.text())
    return runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cluster", choices=("slurm", "ray"))
    parser.add_argument("--record", type=Path, help="folder for DATE-launchers-CLUSTER.md")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = Path(tempfile.mkdtemp(prefix="zerojax-launchers-"))
    if args.cluster == "slurm":
        with slurm(folder / "slurm"):
            runs = slurm_runs(folder)
        version = subprocess.run(["sinfo", "--version"], capture_output=True, text=True).stdout
    else:
        runs = ray_runs(folder)
        version = "ray"
    rows = [HEAD, *(run.row() for run in runs)]
    console().print(console_table(rows))
    ends = {run.checksum for run in runs} - {""}
    print(f"{version.strip()}; the runs that ended agree bit for bit: {len(ends) == 1}")
    if args.record:
        path = args.record / f"{datetime.date.today()}-launchers-{args.cluster}.md"
        title = heading(f"Real runs under {args.cluster.capitalize()}").replace(
            " (figures as JSON beside this file)", ""
        )
        note = (
            f"Two processes on the CPU, stage 3, {STEPS} steps with a save every 20. The runs that "
            f"ended agree bit for bit: {len(ends) == 1}."
        )
        path.write_text(f"{title}\n\n{note}\n\n{markdown_table(rows, len(HEAD))}\n")


if __name__ == "__main__":
    main()
