"""`zerojax launch`: a script in several processes, on one machine or several."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from zerojax.distributed.gpus import Gpu
from zerojax.launch import kubernetes as kubernetes_jobs
from zerojax.launch import local, mpi
from zerojax.launch import slurm as slurm_jobs
from zerojax.launch.descent import guarded
from zerojax.launch.error import UsageError
from zerojax.launch.gpus import gpus
from zerojax.launch.hosts import Host, read_hostfile, select
from zerojax.launch.job import PART, Job, Node, by_hand, checked_script, free_port, node_command

# All arguments after the script belong to the script.
SETTINGS = {"allow_interspersed_args": False}


def launch(
    context: typer.Context,
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT ARGS", help="The script to run.")],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name.")] = False,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(help="Processes of a machine, or 8,4 for two; default: one a GPU."),
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="Lines as worker-0 slots=8.")] = None,
    include: Annotated[
        str | None, typer.Option(help="Hosts and GPUs to use, such as worker-0@worker-1:0,2.")
    ] = None,
    exclude: Annotated[str | None, typer.Option(help="Hosts and GPUs to leave out.")] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Number of machines, the first of the hostfile."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Number of this machine; starts only its processes.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first machine; default: a free port.")
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(metavar="OPTIONS", help="Submit to Slurm; sbatch's options, in one string."),
    ] = None,
    kubernetes: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Print a manifest of pods of this image.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="The file of `accelerate config`; options override it.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Number of restarts after a failure or a preemption.")
    ] = 0,
    watchdog: Annotated[
        str | None, typer.Option(help="Seconds without a step until all processes end, or off.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="A folder for each process's output.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=10**6, help="Seconds to save, from SIGTERM to SIGKILL.")
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started.")
    ] = False,
) -> None:
    """Runs SCRIPT in several processes, which join by zerojax.init_distributed().

    Options of the launch come before SCRIPT; all arguments after SCRIPT belong to SCRIPT.

    Exits with the status of the process that failed first (128 + N: ended by signal N), with 75 if
    all processes were preempted and saved, with 76 if a watchdog ended them, and with 2 if nothing
    can be started.
    """
    environ: Mapping[str, str] = context.obj or os.environ
    try:
        words = ("-m", *script) if module else tuple(script)
        if slurm is not None and kubernetes is not None:
            raise UsageError("--slurm and --kubernetes are both given: remove one")
        cluster = None if kubernetes is None else "--kubernetes"
        cluster = cluster if slurm is None else "--slurm"
        words = words if kubernetes is not None else checked_script(words)
        job = Job(words, grace, max_restarts, watchdog, log_dir)
        if config_file is not None:
            from zerojax.launch import accelerate  # the tables of keys take a while to load

            settings = accelerate.read(config_file)
            environ = {**settings.environ, **environ}
            nproc_per_node = nproc_per_node or settings.nproc_per_node
            num_nodes = num_nodes or settings.num_nodes
            if cluster is None and hostfile is None:
                hostfile, coordinator = settings.hostfile, coordinator or settings.coordinator
                node_rank = settings.node_rank if node_rank is None else node_rank
        if cluster is not None:
            placement = (hostfile, include, exclude, node_rank, coordinator)
            if any(option is not None for option in placement):
                raise UsageError(
                    f"{cluster} places the processes: remove --hostfile, --include, "
                    "--exclude, --node-rank and --coordinator"
                )
            if nproc_per_node is None or not re.fullmatch("[1-9][0-9]{0,5}", nproc_per_node):
                raise UsageError(f"{cluster} needs --nproc-per-node, for each machine")
            machines = num_nodes or 1, int(nproc_per_node)
            if kubernetes is not None:
                jobset = kubernetes_jobs.manifest(job, kubernetes, *machines, environ)
                print(kubernetes_jobs.as_yaml(jobset), end="")
                return
            batch = slurm_jobs.batch_script(job, *machines, slurm or "", environ)
            if not dry_run:
                raise typer.Exit(slurm_jobs.submit(batch, environ))
            print(batch, end="")
            return
        find_gpus = cache(lambda: gpus(environ))  # nvidia-smi may take seconds
        hosts = None
        if hostfile is not None:
            hosts = select(read_hostfile(hostfile), include, exclude)
        elif include or exclude:
            if not find_gpus():
                raise UsageError("--include and --exclude need GPUs here, or a --hostfile")
            hosts = select([Host("localhost", tuple(range(len(find_gpus()))))], include, exclude)
        counts = _counts(nproc_per_node, hosts, num_nodes, node_rank, find_gpus)
        hosts = hosts and hosts[: len(counts)]
        if node_rank is None and hosts is not None and (len(counts) > 1 or not hosts[0].is_here):
            status = _start_on_hosts(job, hosts, counts, coordinator, environ, dry_run)
        else:
            local_gpus = find_gpus()
            node = _node(node_rank or 0, counts, coordinator, hosts, local_gpus, environ)
            if len(counts) > 1 and max_restarts:
                raise UsageError(
                    "--max-restarts excludes --node-rank: use --hostfile, Slurm or Kubernetes"
                )
            if node.gpus is not None:
                local_gpus = [gpu for gpu in local_gpus if gpu.name in node.gpus]
            local.check_places(node, local_gpus)
            if dry_run:
                local.show(job, node, local_gpus, environ)
                return
            status = guarded(
                lambda: local.run(job, node, local_gpus, environ),
                parent=os.getppid() if PART in environ else None,
            )
    except UsageError as error:
        typer.echo(f"zerojax launch: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _start_on_hosts(
    job: Job,
    hosts: list[Host],
    counts: tuple[int, ...],
    coordinator: str | None,
    environ: Mapping[str, str],
    dry_run: bool,
) -> int:
    """Starts a job on several hosts, or prints the commands; returns the exit status."""

    def nodes() -> list[Node]:
        address = _address(coordinator) if coordinator else f"{hosts[0].name}:{free_port()}"
        cpu = environ.get("JAX_PLATFORMS") == "cpu"
        return [
            Node(rank, counts, address, None if cpu else tuple(map(str, host.slots[:count])))
            for rank, (host, count) in enumerate(zip(hosts, counts, strict=True))
        ]

    if mpi.installed() is not None and not dry_run:
        return guarded(lambda: mpi.run(job, hosts, nodes, environ))
    commands = [node_command(job, node, environ) for node in nodes()]
    if mpi.installed() is None:
        typer.echo(
            "zerojax launch: mpirun is not installed; start each host's part there:", err=True
        )
    else:
        print("# all hosts, from here:")
        print(shlex.join(mpi.mpirun_command(hosts, commands)))
    for host, command in zip(hosts, commands, strict=True):
        print(f"# {host.name}:\n{by_hand(command)}")
    return 0 if dry_run else 2


def _counts(
    given: str | None,
    hosts: list[Host] | None,
    num_nodes: int | None,
    node_rank: int | None,
    gpus_here: Callable[[], list[Gpu]],
) -> tuple[int, ...]:
    """Returns the number of processes of each machine."""
    if given is not None and not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", given):
        raise UsageError(f"--nproc-per-node: expected 8, or 8,4 for two machines, got {given!r}")
    counts = tuple(map(int, given.split(","))) if given else ()
    if hosts is not None:
        if num_nodes is not None and num_nodes > len(hosts):
            raise UsageError(
                f"--num-nodes {num_nodes}: the hostfile has {len(hosts)} hosts: lower it"
            )
        hosts = hosts[:num_nodes]
    elif max(num_nodes or 1, len(counts)) > 1 and node_rank is None:
        raise UsageError("several machines need --hostfile, or --node-rank and --coordinator")
    machines = len(hosts) if hosts is not None else num_nodes or len(counts) or 1
    if len(counts) == 1:
        counts *= machines
    if counts and len(counts) != machines:
        raise UsageError(f"--nproc-per-node {given}: {machines} machines take one number")
    if node_rank is not None and node_rank >= machines:
        raise UsageError(f"--node-rank {node_rank} must be below the {machines} machines")
    if hosts is None:
        return counts or (len(gpus_here()) or 1,) * machines
    for host, count in zip(hosts, counts, strict=bool(counts)):
        if count > len(host.slots):
            raise UsageError(
                f"--nproc-per-node {count}: {host.name} has {len(host.slots)} slots: lower it"
            )
    return counts or tuple(len(host.slots) for host in hosts)


def _node(
    rank: int,
    counts: tuple[int, ...],
    coordinator: str | None,
    hosts: list[Host] | None,
    here: list[Gpu],
    environ: Mapping[str, str],
) -> Node:
    """Returns this machine's part of the job."""
    if len(counts) > 1 and coordinator is None:
        raise UsageError("--node-rank needs --coordinator HOST:PORT, the same on all machines")
    address = None if coordinator is None else _address(coordinator)
    if hosts is None or environ.get("JAX_PLATFORMS") == "cpu":
        return Node(rank, counts, address)
    slots = hosts[rank].slots[: counts[rank]]
    if slots[-1] >= len(here):
        raise UsageError(
            f"{hosts[rank].name} has slots up to {slots[-1]}, but this machine {len(here)} GPUs: "
            "correct the hostfile"
        )
    return Node(rank, counts, address, tuple(here[slot].name for slot in slots))


def _address(given: str) -> str:
    match = re.fullmatch(r"(?:\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})", given)
    if not match or not 0 < int(match[1]) < 2**16:
        raise UsageError(f"--coordinator: expected HOST:PORT, got {given!r}")
    return given
