"""Accelerate's YAML: the settings that a launch uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from zerojax.config import ConfigError
from zerojax.config.accelerate import read_checked
from zerojax.launch.error import UsageError

_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
_PORT = 29500  # Accelerate's


class AccelerateOptions(NamedTuple):
    """A file of ``accelerate config`` as options of ``zerojax launch``.

    Attributes:
      nproc_per_node: Processes on each machine; None: one a GPU.
      num_nodes: Number of machines; None if the file names one machine or a hostfile.
      node_rank: Index of this machine; None if the file names one machine or a hostfile.
      coordinator: HOST:PORT; None if the file names one machine or a hostfile.
      hostfile: Path of DeepSpeed's hostfile; None for one machine, or if the file names none.
      environ: Environment variables, for those that are not set.
    """

    nproc_per_node: str | None
    num_nodes: int | None
    node_rank: int | None
    coordinator: str | None
    hostfile: Path | None
    environ: dict[str, str]


def read(path: Path) -> AccelerateOptions:
    """Reads a file that ``accelerate config`` wrote, YAML or JSON.

    Raises:
      UsageError: The file cannot be read, has unknown keys, or describes machines that
        ``zerojax launch`` does not start.
    """
    where = f"--config-file {path}"
    try:
        values, problems = read_checked(path)
    except ConfigError as error:
        values, problems = {}, [*error.problems]
    environment = values.get("compute_environment", "LOCAL_MACHINE")
    kind = str(values.get("distributed_type"))
    if environment != "LOCAL_MACHINE":
        problems = [f"compute_environment {environment} is not supported: write LOCAL_MACHINE"]
    elif not problems and kind not in _TYPES:
        problems = [f"distributed_type {kind} is none of {', '.join(_TYPES)}: use --nproc-per-node"]
    if problems:
        raise UsageError(f"{where}: {'; '.join(problems)}")
    return _machines(where, values, kind)


def _machines(where: str, values: dict[str, Any], kind: str) -> AccelerateOptions:
    nodes = values.get("num_machines", 1)
    count = 1 if kind == "NO" else values.get("num_processes", -1)
    if count == -1:  # Accelerate's value for "not set"
        count = None
    if count is not None and (count < 1 or count % nodes):
        raise UsageError(f"{where}: num_processes {count} is no multiple of num_machines {nodes}")
    environ = {}
    if values.get("use_cpu") or kind == "MULTI_CPU":
        environ["JAX_PLATFORMS"] = "cpu"
    ids = str(values.get("gpu_ids", "all")).replace(" ", "")
    if ids != "all":
        environ["CUDA_VISIBLE_DEVICES"] = ids
    per_node = None if count is None else str(count // nodes)
    hostfile = values.get("deepspeed_config.deepspeed_hostfile")
    if nodes == 1 or hostfile:
        file_of_hosts = Path(hostfile) if nodes > 1 and hostfile else None
        return AccelerateOptions(per_node, None, None, None, file_of_hosts, environ)
    address, given = values.get("main_process_ip"), {"num_processes": per_node}
    if missing := [name for name, x in {"main_process_ip": address, **given}.items() if not x]:
        raise UsageError(f"{where}: num_machines {nodes} needs {' and '.join(missing)}")
    port = values.get("main_process_port", _PORT)
    rank = values.get("machine_rank", 0)
    return AccelerateOptions(per_node, nodes, rank, f"{address}:{port}", None, environ)
