"""One machine's processes: the environment of each, and attempts until they succeed."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from zerojax.launch.error import UsageError, in_a_line
from zerojax.launch.failure import say
from zerojax.launch.gpus import Gpu, near_cpus
from zerojax.launch.group import STALLED, Group, Outcome, Process
from zerojax.launch.job import PART, Job, Node, free_port, with_token

_CPU_PROCESSES = 32  # per CPU; more are a typing error, which would overload the machine


class Place(NamedTuple):
    """The GPU and the CPUs of a process.

    Attributes:
      process: Index among all processes of the job.
      gpu: The only GPU of the process; None: it has no GPU, or all.
      cpus: The CPUs of the process; None: those of the launcher.
    """

    process: int
    gpu: Gpu | None
    cpus: frozenset[int] | None


def places(node: Node, gpus: list[Gpu]) -> list[Place]:
    """Returns the places of a machine's processes, one GPU each; CPU processes without GPUs.

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
    first = sum(node.counts[: node.rank])
    assigned = [gpus[i] if gpus and (count > 1 or len(gpus) == 1) else None for i in range(count)]
    return [Place(first + i, gpu, near_cpus(gpu)) for i, gpu in enumerate(assigned)]


def settings(job: Job, node: Node, place: Place, run_dir: Path, on_gpus: bool) -> dict[str, str]:
    """Returns the variables of a process that are added to the launcher's environment."""
    first = sum(node.counts[: node.rank])
    added = {
        "ZEROJAX_COORDINATOR": str(node.coordinator),
        "ZEROJAX_NUM_PROCESSES": str(sum(node.counts)),
        "ZEROJAX_PROCESS_ID": str(place.process),
        "ZEROJAX_LOCAL_PROCESSES": str(node.counts[node.rank]),
        "ZEROJAX_LOCAL_PROCESS_ID": str(place.process - first),
        "ZEROJAX_RUN_DIR": str(run_dir),
    }
    if job.watchdog is not None:
        added["ZEROJAX_WATCHDOG"] = job.watchdog
    if node.gpus is not None:
        added["CUDA_VISIBLE_DEVICES"] = ",".join(node.gpus)
    if on_gpus:
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi
        if place.gpu is not None:
            added["CUDA_VISIBLE_DEVICES"] = place.gpu.name
    return added


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
    logs: Path | None,
) -> list[Process]:
    """Returns the processes of one attempt on this machine.

    Args:
      job, node: The job to start, and the machine's part of it.
      gpus: GPUs of this machine.
      environ: The launcher's environment.
      run_dir: A new folder, only for this attempt, in which processes leave their files.
      logs: Folder for the output of processes; None: the output is not kept.
    """
    result = []
    for place in places(node, gpus):
        i = place.process
        added = settings(job, node, place, run_dir, bool(gpus))
        result.append(
            Process(
                number=i,
                command=job.command,
                environ={**environ, **defaults(environ, bool(gpus)), **added},
                cpus=place.cpus,
                log=logs and logs / f"{i}.log",
                joined=run_dir / f"joined.{i}" if sum(node.counts) > 1 else None,
                error=run_dir / f"error.{i}",
            )
        )
    return result


def show(job: Job, node: Node, gpus: list[Gpu], environ: Mapping[str, str]) -> None:
    """Prints the processes that would be started on this machine."""
    node = node._replace(coordinator=node.coordinator or "127.0.0.1:PORT")
    for place in places(node, gpus):
        added = settings(job, node, place, Path("RUN_DIR"), bool(gpus))
        added |= defaults(environ, bool(gpus))
        device = f"GPU {place.gpu.name}" if place.gpu else ("all GPUs" if gpus else "CPU")
        bound = f", CPUs {', '.join(map(str, sorted(place.cpus)))}" if place.cpus else ""
        print(f"# process {place.process}: {device}{bound}")
        variables = [f"{name}={value}" for name, value in added.items()]
        print(shlex.join(["env", *variables, *job.command]))


def run(job: Job, node: Node, gpus: list[Gpu], environ: Mapping[str, str]) -> int:
    """Starts this machine's processes, restarts them if allowed, and returns the exit status."""
    is_nested = is_part(environ)
    environ = {name: value for name, value in environ.items() if name != PART}
    if len(node.counts) == 1:
        environ = with_token(environ)

    def attempt() -> Outcome:
        # The launcher that starts several machines creates one folder for each attempt.
        logs = job.log_dir and job.log_dir.absolute()
        if logs is not None and len(node.counts) == 1:
            logs = new_attempt(logs)
        run_dir = Path(tempfile.mkdtemp(prefix="zerojax-launch-"))
        local_node = node._replace(coordinator=node.coordinator or f"127.0.0.1:{free_port()}")
        try:
            outcome = Group(
                processes(job, local_node, gpus, environ, run_dir, logs), job.grace
            ).run()
        finally:
            stalled = [*run_dir.glob("stacks.*")]
            folder = run_dir if logs is None else logs
            if logs is not None:
                _keep([*run_dir.glob("error.*"), *stalled], logs)
            if logs is not None or not stalled:
                shutil.rmtree(run_dir, ignore_errors=True)
        if outcome.failure is not None:
            outcome.failure.report() if is_nested else outcome.failure.show()
        if outcome.status == STALLED and stalled:
            say(f"the stacks of all threads are in {folder}/stacks.*")
        return outcome

    return attempts(attempt, job.max_restarts)


def new_attempt(folder: Path) -> Path:
    """Creates a folder ``attempt-N`` that no launch has used.

    Raises:
      UsageError: The folder cannot be created.
    """
    number = 1
    while True:
        try:
            (attempt := folder / f"attempt-{number}").mkdir(parents=True)
            return attempt
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UsageError(f"--log-dir {folder}: {in_a_line(error)}; name another") from None


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


def is_part(environ: Mapping[str, str]) -> bool:
    """Returns whether a launcher of several machines has started this launcher."""
    return PART in environ


def parent_to_watch(environ: Mapping[str, str]) -> int | None:
    """Returns the id of mpirun's daemon on this machine if mpirun started this launcher."""
    return os.getppid() if is_part(environ) else None
