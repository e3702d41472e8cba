"""Who launched this process, and as which of how many: read off the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """Processes that were not launched as one job, or that do not fit together."""


@dataclass(frozen=True)
class Launched:
    """A process among those of its job.

    Attributes:
      coordinator: ``host:port``, where process 0 listens.
      count: The number of processes.
      index: Of this process, from 0.
      local_count: The number of processes on this host; None where the launcher does not say.
      local_index: Of this process among them, from 0; None likewise.
      by: The launcher.
    """

    coordinator: str
    count: int
    index: int
    local_count: int | None
    local_index: int | None
    by: str

    @property
    def several_hosts(self) -> bool:
        """Whether processes run on other hosts too, as far as the launcher says."""
        return self.local_count is not None and self.local_count < self.count


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher, the first that is set of each; ``index`` tells its processes."""

    by: str
    index: tuple[str, ...]
    count: tuple[str, ...]
    local_index: tuple[str, ...] = ()
    local_count: tuple[str, ...] = ()


# Those that run inside another come first: torchrun under srun, mpirun in a Slurm allocation.
_LAUNCHERS = (
    _Launcher(
        "zerojax launch",
        ("ZEROJAX_PROCESS_ID",),
        ("ZEROJAX_NUM_PROCESSES",),
        ("ZEROJAX_LOCAL_PROCESS_ID",),
        ("ZEROJAX_LOCAL_PROCESSES",),
    ),
    _Launcher("Kubeflow Trainer", ("JAX_PROCESS_ID",), ("JAX_NUM_PROCESSES",)),
    _Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # A batch script has SLURM_PROCID too; only srun sets the list of the step's nodes.
    _Launcher(
        "srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)
    ),
    _Launcher("Kubernetes", ("JOB_COMPLETION_INDEX",), ("ZEROJAX_NUM_PROCESSES",)),
)
_COORDINATORS = ("ZEROJAX_COORDINATOR", "JAX_COORDINATOR_ADDRESS")


def launched(environ: Mapping[str, str]) -> Launched | None:
    """This process as its launcher describes it; None where no launcher speaks, or of one process.

    Known are ``zerojax launch``, srun, Open MPI 4 and 5, torchrun and what sets its variables,
    Kubeflow Trainer, and indexed Jobs of Kubernetes with ``ZEROJAX_NUM_PROCESSES`` and
    ``ZEROJAX_COORDINATOR``. The latter overrides the coordinator of the others too.

    Args:
      environ: ``os.environ``, or what stands for it.

    Raises:
      LaunchError: A variable is missing or makes no sense; the message names it, with the remedy.

    Example:
      >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
      >>> launched(torchrun)
      Launched(coordinator='n1:29500', count=2, index=1, local_count=None, local_index=None, \
by='torchrun')
    """
    for launcher in _LAUNCHERS:
        in_step = launcher.by != "srun" or "SLURM_STEP_NODELIST" in environ
        if in_step and any(name in environ for name in launcher.index):
            break
    else:
        _check_alone(environ)
        return None
    if launcher.by == "Kubernetes" and environ.get("ZEROJAX_NUM_PROCESSES") is None:
        raise LaunchError(
            "JOB_COMPLETION_INDEX says that this is a pod of an indexed Job, but not of how many: "
            "set ZEROJAX_NUM_PROCESSES to the Job's completions (1 where each pod is a run of its "
            "own) and ZEROJAX_COORDINATOR to host:port of pod 0, as the manifests of "
            "`python -m zerojax launch --kubernetes` do"
        )
    count = _number(environ, launcher, launcher.count)
    index = _number(environ, launcher, launcher.index)
    if count == 1 and index == 0:
        return None
    if index >= count:
        raise LaunchError(
            f"{launcher.index[0]}={index}, but the processes are numbered from 0 to {count - 1} "
            f"({launcher.count[0]}={count}): correct one of them"
        )
    local_index = _optional(environ, launcher, launcher.local_index)
    local_count = _optional(environ, launcher, launcher.local_count)
    if launcher.by == "srun":
        local_count = _tasks_of_node(environ)
    if local_count is not None and not (local_index or 0) < local_count <= count:
        raise LaunchError(
            f"{launcher.by} says that process {index} of {count} is number {local_index} of the "
            f"{local_count} on its host: correct {' and '.join(launcher.local_index)}"
        )
    coordinator = _coordinator(environ, launcher)
    return Launched(coordinator, count, index, local_count, local_index, launcher.by)


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raises where a number of processes is set, but not which of them this is."""
    for launcher in _LAUNCHERS[:3]:
        if any(environ.get(name, "1") != "1" for name in launcher.count):
            raise LaunchError(
                f"{launcher.count[0]}={environ[launcher.count[0]]}, but {launcher.index[0]} is not "
                f"set: give each process its number from 0 on, or unset {launcher.count[0]}"
            )


def _number(environ: Mapping[str, str], launcher: _Launcher, names: tuple[str, ...]) -> int:
    name = next((name for name in names if name in environ), None)
    if name is None:
        has = next(name for name in launcher.index if name in environ)
        raise LaunchError(
            f"{has}={environ[has]} looks like {launcher.by}, but {names[-1]} is not set: set "
            f"{names[-1]}, or unset {has} where this is the only process"
        )
    try:
        number = int(environ[name])
    except ValueError:
        number = -1
    if number < (name in launcher.count + launcher.local_count):
        raise LaunchError(f"{name}={environ[name]!r} is no such number: correct {name}")
    return number


def _optional(
    environ: Mapping[str, str], launcher: _Launcher, names: tuple[str, ...]
) -> int | None:
    return _number(environ, launcher, names) if any(name in environ for name in names) else None


def _coordinator(environ: Mapping[str, str], launcher: _Launcher) -> str:
    """``host:port``, the same in all processes."""
    for name in _COORDINATORS:
        if name in environ:
            return _address(name, environ[name])
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        port = environ["MASTER_PORT"]
        # torchrun's agent listens at the port itself.
        if "TORCHELASTIC_RUN_ID" in environ and port.isdecimal():
            port = str(int(port) + (1 if int(port) < 65535 else -1))
        return _address("MASTER_ADDR:MASTER_PORT", f"{environ['MASTER_ADDR']}:{port}")
    if launcher.by == "torchrun":
        missing = "MASTER_PORT" if "MASTER_ADDR" in environ else "MASTER_ADDR"
        raise LaunchError(
            f"RANK and WORLD_SIZE are set, but {missing} is not: set MASTER_ADDR to the host of "
            "rank 0 and MASTER_PORT to a port that is free there, the same in all processes"
        )
    if launcher.by == "srun":
        return f"{first_host(environ['SLURM_STEP_NODELIST'])}:{_port(environ['SLURM_JOB_ID'])}"
    # Open MPI 4: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", of the host of mpirun.
    four = re.search(
        r"(\d+)\.\d+;tcp6?://(?:\[([^\],]+)|([^,:]+))", environ.get("OMPI_MCA_orte_hnp_uri", "")
    )
    if four:
        host = f"[{four[2]}]" if four[2] else four[3]
        return f"{host}:{_port(str(int(four[1]) >> 12))}"
    # Open MPI 5: "prterun-HOST-PID@JOB", of the process of mpirun.
    five = re.fullmatch(r"prte(?:run)?-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", ""))
    if five:
        return f"{five[1]}:{_port(five[2])}"
    raise LaunchError(
        f"{launcher.by} started this process, but nothing says where process 0 listens: set "
        "ZEROJAX_COORDINATOR to host:port, the host of process 0 and a port that is free there, "
        "the same in all processes"
    )


def _address(name: str, text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"{name}={text!r} is not host:port, as n1:29500: correct {name}")
    return text


def _port(job: str) -> int:
    """A port that follows from the number of the job: its neighbours' are others."""
    return 61440 + int(re.sub(r"\D", "", job) or 0) % 4096


def first_host(nodes: str) -> str:
    """The first host of Slurm's list.

    Example:
      >>> first_host("node[007-015,020],other"), first_host("gpu-1,gpu-2")
      ('node007', 'gpu-1')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tasks_of_node(environ: Mapping[str, str]) -> int | None:
    """The step's tasks on this node, of "2(x3),1" and the node's number."""
    each: list[int] = []
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        each += [int(tasks)] * int(times or 1)
    node = environ.get("SLURM_NODEID", "0")
    return each[int(node)] if node.isdecimal() and int(node) < len(each) else None
