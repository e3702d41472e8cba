"""One machine's processes: the environment of each, and attempts until they succeed."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from zerojax.distributed.gpus import Gpu
from zerojax.launch.error import UsageError, in_a_line
from zerojax.launch.failure import Outcome, say
from zerojax.launch.gpus import near_cpus
from zerojax.launch.group import STALLED, Group, Process
from zerojax.launch.job import PART, Job, Node, free_port, with_token

_CPU_PROCESSES = 32  # per CPU; more are a typing error, which would overload the machine


def check_places(node: Node, gpus: list[Gpu]) -> None:
    """Refuses more processes than this machine has places for.

    Raises:
      UsageError: There are more processes than GPUs, or far more than CPUs.
    """
    count = node.counts[node.rank]
    if gpus and count > len(gpus):
        raise UsageError(f"{count} processes do not fit {len(gpus)} GPUs: start fewer")
    if not gpus and count > _CPU_PROCESSES * (os.cpu_count() or 1):
        raise UsageError(
            f"--nproc-per-node {count}: {os.cpu_count()} CPUs take at most {_CPU_PROCESSES} "
            "processes each: lower it"
        )


def defaults(environ: Mapping[str, str], on_gpus: bool) -> dict[str, str]:
    """Returns the default variables of a process, without those that the user has set."""
    variables = {"PYTHONUNBUFFERED": "1"}  # lines arrive when they are printed
    if not on_gpus:
        variables["JAX_PLATFORMS"] = "cpu"
        if "xla_force_host_platform_device_count" not in environ.get("XLA_FLAGS", ""):
            variables["JAX_NUM_CPU_DEVICES"] = "1"
    return {name: value for name, value in variables.items() if not environ.get(name)}


def processes(
    job: Job,
    node: Node,
    gpus: list[Gpu],
    environ: Mapping[str, str],
    run_dir: Path,
    logs: Path | None = None,
) -> list[Process]:
    """Returns the processes of one attempt on this machine.

    Each has one GPU, but a single process has all; without GPUs they are CPU processes.

    Args:
      job, node: The job to start, and the machine's part of it.
      gpus: GPUs of this machine.
      environ: The launcher's environment.
      run_dir: A new folder, only for this attempt, in which processes leave their files.
      logs: Folder for the output of processes; None: the output is not kept.
    """
    count, total = node.counts[node.rank], sum(node.counts)
    first = sum(node.counts[: node.rank])
    result = []
    for local, number in enumerate(range(first, first + count)):
        variables = {
            "ZEROJAX_COORDINATOR": str(node.coordinator),
            "ZEROJAX_NUM_PROCESSES": str(total),
            "ZEROJAX_PROCESS_ID": str(number),
            "ZEROJAX_LOCAL_PROCESSES": str(count),
            "ZEROJAX_LOCAL_PROCESS_ID": str(local),
            "ZEROJAX_RUN_DIR": str(run_dir),
        }
        if job.watchdog is not None:
            variables["ZEROJAX_WATCHDOG"] = job.watchdog
        if node.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(node.gpus)
        if gpus:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi
        gpu = gpus[local] if gpus and (count > 1 or len(gpus) == 1) else None
        if gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpu.name
        result.append(
            Process(
                number=number,
                command=job.command,
                variables=variables | defaults(environ, bool(gpus)),
                cpus=near_cpus(gpu),
                log=logs and logs / f"{number}.log",
                joined=run_dir / f"joined.{number}" if total > 1 else None,
                error=run_dir / f"error.{number}",
            )
        )
    return result


def show(job: Job, node: Node, gpus: list[Gpu], environ: Mapping[str, str]) -> None:
    """Prints the processes that would be started on this machine."""
    node = node._replace(coordinator=node.coordinator or "127.0.0.1:PORT")
    for process in processes(job, node, gpus, environ, Path("RUN_DIR")):
        names = process.variables.get("CUDA_VISIBLE_DEVICES")
        device = "CPU" if not gpus else f"GPU {names}" if names else "all GPUs"
        bound = f", CPUs {', '.join(map(str, sorted(process.cpus)))}" if process.cpus else ""
        print(f"# process {process.number}: {device}{bound}")
        variables = [f"{name}={value}" for name, value in process.variables.items()]
        print(shlex.join(["env", *variables, *process.command]))


def run(job: Job, node: Node, gpus: list[Gpu], environ: Mapping[str, str]) -> int:
    """Starts this machine's processes, restarts them if allowed, and returns the exit status."""
    is_nested = PART in environ
    environ = {name: value for name, value in environ.items() if name != PART}
    if len(node.counts) == 1:
        environ = with_token(environ)

    def attempt() -> Outcome:
        # The launcher that starts several machines creates one folder for each attempt.
        logs = job.log_dir and job.log_dir.absolute()
        if logs is not None:
            logs = new_attempt(logs, is_numbered=len(node.counts) == 1)
        run_dir = Path(tempfile.mkdtemp(prefix="zerojax-launch-"))
        local_node = node._replace(coordinator=node.coordinator or f"127.0.0.1:{free_port()}")
        try:
            started = processes(job, local_node, gpus, environ, run_dir, logs)
            outcome = Group(started, environ, job.grace).run()
        finally:
            stalled = [*run_dir.glob("stacks.*")]
            folder = run_dir if logs is None else logs
            if logs is not None:
                _keep([*run_dir.glob("error.*"), *stalled], logs)
            if logs is not None or not stalled:
                shutil.rmtree(run_dir, ignore_errors=True)
        outcome.report() if is_nested else outcome.show()
        if outcome.status == STALLED and stalled:
            say(f"the stacks of all threads are in {folder}/stacks.*")
        return outcome

    return attempts(attempt, job.max_restarts)


def new_attempt(folder: Path, *, is_numbered: bool = True) -> Path:
    """Creates a folder ``attempt-N`` that no launch has used, or the folder itself.

    Raises:
      UsageError: The folder cannot be created.
    """
    attempt, number = folder, 0
    try:
        while is_numbered and (number == 0 or attempt.exists()):
            number += 1
            attempt = folder / f"attempt-{number}"
        attempt.mkdir(parents=True, exist_ok=not is_numbered)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: {in_a_line(error)}; name another") from None
    return attempt


def _keep(files: list[Path], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, folder)
    except OSError as error:
        say(f"{', '.join(file.name for file in files)} could not be moved to {folder}: {error}")


def attempts(attempt: Callable[[], Outcome], max_restarts: int) -> int:
    """Returns the exit status of the first attempt that succeeds, or of the last.

    Args:
      attempt: Starts all processes, and waits.
      max_restarts: The most attempts that may follow the first.
    """
    for number in range(1, max_restarts + 2):
        outcome = attempt()
        if outcome.status == 0 or not outcome.again or number > max_restarts:
            break
        say(f"attempt {number + 1} of {max_restarts + 1}, because {outcome.why}")
    return outcome.status
