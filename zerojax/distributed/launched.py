"""This process's launcher, its index and the number of processes, from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


class LaunchError(RuntimeError):
    """Error for processes that were not launched as one job, or that do not fit together."""


@dataclass(frozen=True)
class Launched:
    """A process among those of its job.

    Attributes:
      coordinator: ``host:port``, where process 0 listens.
      count: The number of processes.
      index: Index of this process, from 0.
      several_hosts: Whether processes run on other hosts too; None if not stated.
      local_index: Index of this process on its host, from 0; None if not stated.
      by: The launcher.
      token: A secret of the run, from ``zerojax launch`` or from the user; "" for none.
    """

    coordinator: str
    count: int
    index: int
    several_hosts: bool | None
    local_index: int | None
    by: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class _Launcher:
    """The environment variables of a launcher; ``index`` marks the processes that it starts."""

    by: str
    index: str
    count: str
    local_index: str = ""
    local_count: str = ""


# Launchers that run inside another come first: torchrun under srun, mpirun in a Slurm allocation.
_LAUNCHERS = (
    _Launcher(
        "zerojax launch",
        "ZEROJAX_PROCESS_ID",
        "ZEROJAX_NUM_PROCESSES",
        "ZEROJAX_LOCAL_PROCESS_ID",
        "ZEROJAX_LOCAL_PROCESSES",
    ),
    _Launcher("Kubeflow Trainer", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", "ZEROJAX_NUM_PROCESSES"),
)
_STEP = "SLURM_STEP_NODELIST"
_HOST = re.compile(r"[\w.-]+|\[?[0-9a-fA-F.]*:[0-9a-fA-F.:]*(%[\w.-]+)?\]?")  # a name, or IPv6


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Returns this process as its launcher describes it; None without launcher, or for one process.

    The known launchers are ``zerojax launch``, srun, Open MPI 4 and 5, torchrun and programs that
    set its variables, Kubeflow Trainer, and indexed Jobs of Kubernetes with
    ``ZEROJAX_NUM_PROCESSES`` and ``ZEROJAX_COORDINATOR``. ``ZEROJAX_COORDINATOR`` overrides the
    coordinator of the other launchers too.

    Args:
      environ: ``os.environ``, or a substitute.

    Raises:
      LaunchError: A variable is missing or invalid; the message names it, with the remedy.

    Example:
      >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
      >>> launched(torchrun)
      Launched(coordinator='n1:29500', count=2, index=1, several_hosts=None, local_index=None, \
by='torchrun')
    """
    for launcher in _LAUNCHERS:
        # A Slurm batch script has an index too; only srun sets the list of the step's nodes.
        if launcher.index in environ and (launcher.by != "srun" or _STEP in environ):
            break
    else:
        _check_single(environ)
        return None
    if launcher.by == "Kubernetes" and launcher.count not in environ:
        raise LaunchError(
            "JOB_COMPLETION_INDEX is set, and the number of pods is not: set ZEROJAX_NUM_PROCESSES "
            "to the Job's completions (1 where each pod is a run of its own) and "
            "ZEROJAX_COORDINATOR to host:port of pod 0"
        )
    count = _number(environ, launcher, launcher.count, 1)
    index = _number(environ, launcher, launcher.index)
    if index >= count:
        raise LaunchError(f"{launcher.index}={index} must be below {launcher.count}={count}")
    if count == 1:
        return None
    local_index, several_hosts = None, None
    if launcher.local_index in environ:
        local_index = _number(environ, launcher, launcher.local_index)
    if launcher.local_count in environ:
        several_hosts = _number(environ, launcher, launcher.local_count, 1) < count
    elif launcher.by == "srun":
        several_hosts = bool(re.search(r"[,\[]", environ[_STEP]))
    coordinator = _coordinator(environ, launcher, several_hosts is False)
    token = environ.get("ZEROJAX_TOKEN", "")
    return Launched(coordinator, count, index, several_hosts, local_index, launcher.by, token)


def _check_single(environ: Mapping[str, str]) -> None:
    """Raises if a number of processes is set, but not the index of this process."""
    for launcher in _LAUNCHERS[:3]:
        if environ.get(launcher.count, "1") != "1":
            raise LaunchError(
                f"{launcher.count}={environ[launcher.count]}, and {launcher.index} is not set: "
                f"number the processes from 0, or unset {launcher.count}"
            )


def _number(environ: Mapping[str, str], launcher: _Launcher, name: str, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        raise LaunchError(
            f"{launcher.index}={environ[launcher.index]} is set ({launcher.by}), and {name} is "
            f"not: set {name}, or unset {launcher.index} for a single process"
        )
    number = _parse_int(text)
    if number is None or number < least:
        raise LaunchError(f"{name}={text[:40]!r} is not a number from {least} on: correct it")
    return number


def _parse_int(text: str) -> int | None:
    """Parses an integer of at most nine digits, as launchers write it; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _coordinator(environ: Mapping[str, str], launcher: _Launcher, local: bool) -> str:
    """Returns ``host:port``, equal in all processes; ``local`` if all are on this host."""
    for name in ("ZEROJAX_COORDINATOR", "JAX_COORDINATOR_ADDRESS"):
        if name in environ:
            return _address(name, environ[name])
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        port = environ["MASTER_PORT"]
        # The agent of torchrun itself then listens at the port.
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (
            agent_port := _parse_int(port)
        ):
            port = str(agent_port + (1 if agent_port < 65535 else -1))
        return _address("MASTER_ADDR:MASTER_PORT", f"{environ['MASTER_ADDR']}:{port}")
    if launcher.by == "torchrun":
        missing = "MASTER_PORT" if "MASTER_ADDR" in environ else "MASTER_ADDR"
        raise LaunchError(
            f"RANK and WORLD_SIZE are set, but {missing} is not: set MASTER_ADDR to the host of "
            "rank 0, and MASTER_PORT to a free port there, in all processes"
        )
    host, job = _first_of(environ, launcher)
    return f"{'localhost' if local else host}:{61440 + int(job) % 4096}"


def _first_of(environ: Mapping[str, str], launcher: _Launcher) -> tuple[str, str]:
    """Returns the host of process 0 and a number of the job, as srun and mpirun state them.

    The port is computed from the job's number, so that concurrent jobs have different ports.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if launcher.by == "srun" and _parse_int(job) is not None:
        return first_host(environ[_STEP]), job
    # Open MPI 4, the host of mpirun: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911".
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if match_v4 := re.match(r"([0-9]{1,10})\.\d+;tcp6?://(\[[^\],]+|[^,:]+)", uri):
        host = f"{match_v4[2]}]" if match_v4[2].startswith("[") else match_v4[2]
        return host, str(int(match_v4[1]) >> 12)  # the lower bits number the job's parts
    # Open MPI 5, host and pid of mpirun: "prterun-HOST-PID@JOB".
    if match_v5 := re.fullmatch(
        r"prte(?:run)?-(.+)-([0-9]{1,9})@\d+", environ.get("PMIX_NAMESPACE", "")
    ):
        return match_v5[1], match_v5[2]
    raise LaunchError(
        f"{launcher.by} does not say where process 0 listens: set ZEROJAX_COORDINATOR to "
        "host:port, the host of process 0 and a free port there, in all processes"
    )


def _address(name: str, text: str) -> str:
    host, _, port = text.rpartition(":")
    if not _HOST.fullmatch(host) or not 0 < (_parse_int(port) or 0) < 65536:
        raise LaunchError(f"{name}={text[:80]!r} is not host:port, such as n1:29500: correct it")
    return text


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list.

    Example:
      >>> first_host("node[007-015,020],other"), first_host("gpu-1,gpu-2")
      ('node007', 'gpu-1')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0] if match else nodes)
