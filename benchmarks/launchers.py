"""Real runs under Slurm: kills, seconds to the end, and the outcome.

    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge    # 12 s
    python -m benchmarks.launchers --record benchmarks/records    # as root; 5 minutes

Two processes on the CPU train for 60 steps (benchmarks/launch_training.py). Slurm's daemons are
stood up here, for two nodes that are this machine; n1 and n2 are added to /etc/hosts for that time.
Without --record no run waits for a time limit.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Answer, Table, question
from benchmarks.supervised import Output, checksum, launch, load, seconds_until_gone, training

STEPS = 60
HEAD = ("run", "what was killed", "to the end of all processes", "what came out")


class Run(NamedTuple):
    """One run, and what became of it.

    Attributes:
      name: The options of the launch.
      killed: What was done to the run.
      seconds: Seconds from then until no process of the first attempt was left; nan where nothing
        was done.
      said: The outcome, in words.
      checksum: The checksum of the parameters at the end; "" where the run did not reach it.
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


def pids_after_step_20(output: Output) -> list[int]:
    output.wait(r"step (20) ", 2)
    return [int(pid) for pid in output.wait(r"pid (\d+) is", 2)]


class SlurmJob:
    """A Slurm job that trains on two nodes."""

    def __init__(self, folder: Path, *options: str, sbatch: str = "--time=30", pause: float = 0.2):
        folder.mkdir()
        self.options = " ".join([f'--slurm "{sbatch}"', *options])
        self.output = Output(folder / "out")
        nodes = ("--num-nodes", "2", "--nproc-per-node", "1")
        words = ["--slurm", f"{sbatch} --output={self.output.path}", *nodes, *options]
        submitted = subprocess.run(
            launch(*words, *training(folder / "checkpoints", STEPS, pause)),
            check=True,
            capture_output=True,
            text=True,
        )
        self.number = submitted.stdout.split()[-1]

    def control(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def shown(self) -> str:
        """The output of ``scontrol`` for the job."""
        return self.control("scontrol", "show", "job", self.number)

    def field(self, name: str) -> str:
        """The value of a field in :meth:`shown`; "gone" where Slurm knows the job no longer."""
        found = re.search(rf"{name}=(\w+)", self.shown())
        return found[1] if found else "gone"

    def processes(self) -> list[int]:
        """The process ids of the first attempt, as soon as it is past step 20."""
        return pids_after_step_20(self.output)

    def end(self, killed: str, seconds: float, said: str = "") -> Run:
        """Waits for the end of the job, and returns the run.

        A job that Slurm queued again begins at once, without Slurm's two minutes of waiting."""
        until = time.monotonic() + 300
        while (state := self.field("JobState")) in ("PENDING", "RUNNING", "COMPLETING"):
            if time.monotonic() > until:
                logs = self.control("sh", "-c", 'tail -n 30 "${SLURM_CONF%/*}"/log/*')
                raise TimeoutError(f"{self.shown()}\n{logs}\n{self.output.text()}")
            if self.field("Reason") == "BeginTime":
                self.control("scontrol", "update", f"jobid={self.number}", "StartTime=now")
            time.sleep(0.5)
        text = self.output.text()
        again = text.count("is queued again")
        for i, step in enumerate(dict.fromkeys(re.findall(r"saved step (\d+), preempted", text))):
            said += f"all saved step {step}, status 75{', queued again' * (i < again)}; "
        return Run(self.options, killed, seconds, f"{said}job {state}", checksum(text))


def slurm_runs(folder: Path, timed: bool) -> list[Run]:
    """Undisturbed, a notice, a killed task, a user's scancel; ``timed``: a time limit too."""
    runs = [SlurmJob(folder / "alone").end("nothing", float("nan"))]

    job = SlurmJob(folder / "term")
    pids = job.processes()
    job.control("scancel", "--batch", "--signal=TERM", job.number)
    seconds = seconds_until_gone(pids)
    runs.append(job.end("SIGTERM to the batch shell after step 20", seconds))

    job = SlurmJob(folder / "kill", "--max-restarts", "1")
    pids = job.processes()
    os.kill(pids[1], signal.SIGKILL)
    seconds = seconds_until_gone(pids)
    said = f"{job.output.wait('(attempt 2 of 2.*)')[0]}, went on after the last save; "
    runs.append(job.end("SIGKILL of one task after step 20", seconds, said))

    job = SlurmJob(folder / "cancel")
    pids = job.processes()
    job.control("scancel", job.number)
    seconds = seconds_until_gone(pids)
    time.sleep(3)
    runs.append(job.end("scancel by the user", seconds))

    if timed:
        job = SlurmJob(folder / "limit", sbatch="--time=2", pause=1.5)
        pids = [int(pid) for pid in job.output.wait(r"pid (\d+) is", 2)]
        job.output.wait("SIGTERM, (passed) to all")
        seconds = seconds_until_gone(pids)
        runs.append(job.end("nothing: the time limit came", seconds))
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
        for file in folder.glob("*.pid"):
            with contextlib.suppress(ValueError):
                end(int(file.read_text()))


def end(pid: int, seconds: float = 10) -> None:
    """SIGTERM to a daemon, which writes its state before its end, waited for ``seconds``."""
    last = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < last:
            os.kill(pid, 0)
            time.sleep(0.05)


@question("launchers", "Real runs under Slurm")
def main(options: argparse.Namespace) -> Answer:
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = Path(tempfile.mkdtemp(prefix="zerojax-launchers-"))
    with slurm(folder / "slurm"):
        runs = slurm_runs(folder, options.record is not None)
    shown = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, check=True)
    rows = [HEAD, *(run.row() for run in runs)]
    ends = {run.checksum for run in runs} - {""}
    return Answer(
        {"runs": rows},
        [
            f"Two processes on the CPU, stage 3, {STEPS} steps with a save every 20.",
            Table(rows, texts=len(HEAD)),
            f"The runs that ended agree bit for bit: {len(ends) == 1}.",
        ],
        missed=[f"the runs end with different parameters: {ends}"] if len(ends) != 1 else [],
        machine=f"{load()}, {shown.stdout.strip()}",
        name="launchers-slurm",
    )


if __name__ == "__main__":
    main()
