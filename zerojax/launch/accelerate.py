"""Accelerate's YAML: what of it a launch takes, and what has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerojax.launch.error import UsageError, in_a_line

_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")

# Accelerate's keys that are the training's, or that nothing here needs.
_TRAINING = (
    *("mixed_precision", "fp16", "deepspeed_config", "fsdp_config", "fp8_config"),
    *("parallelism_config", "dynamo_backend", "dynamo_config", "downcast_bf16"),
)
_UNUSED = (
    *("rdzv_backend", "same_network", "main_training_function", "debug", "enable_cpu_affinity"),
    *("mpirun_config", "megatron_lm_config", "command_file", "commands"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
)
_TAKEN = (
    *("compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "gpu_ids", "use_cpu"),
)
_PORT = 29500  # Accelerate's


class Given(NamedTuple):
    """A file of ``accelerate config`` as options of ``zerojax launch``.

    Attributes:
      nproc_per_node: Processes on each machine; None: one a GPU.
      num_nodes: How many machines.
      node_rank: This machine's number; None where the file names one machine or a hostfile.
      coordinator: HOST:PORT; None likewise.
      hostfile: DeepSpeed's.
      environ: What the environment gets unless it is set.
      ignored: What the file says and has no effect, in words.
    """

    nproc_per_node: str | None
    num_nodes: int | None
    node_rank: int | None
    coordinator: str | None
    hostfile: Path | None
    environ: dict[str, str]
    ignored: list[str]


def read(path: Path) -> Given:
    """The settings of a file that ``accelerate config`` wrote, YAML or JSON.

    Raises:
      UsageError: The file cannot be read, has unknown keys, or describes machines that
        ``zerojax launch`` does not start.
    """
    where = f"--config-file {path}"
    try:
        file = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{where} cannot be read: {in_a_line(error)}") from None
    if not isinstance(file, dict):
        raise UsageError(f"{where}: expected keys and values, as accelerate config writes them")
    unknown = sorted(map(str, set(file) - {*_TAKEN, *_TRAINING, *_UNUSED}))
    environment = file.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise UsageError(
            f"{where}: compute_environment {environment} is not supported: LOCAL_MACHINE alone is"
        )
    if unknown:
        raise UsageError(f"{where}: unknown keys {', '.join(unknown)}: take them out")
    kind = file.get("distributed_type")
    if kind is False:  # YAML's reading of NO
        kind = "NO"
    if kind not in _TYPES:
        raise UsageError(
            f"{where}: distributed_type {kind} is none of {', '.join(_TYPES)}: start without the "
            "file, by --nproc-per-node N"
        )
    return _machines(where, file, kind, _ignored(file))


def _machines(where: str, file: dict[str, Any], kind: str, ignored: list[str]) -> Given:
    nodes = _number(where, file, "num_machines", 1) or 1
    count = 1 if kind == "NO" else _number(where, file, "num_processes", -1)
    if count == -1:  # Accelerate's word for "not said"
        count = None
    if count is not None and (count < 1 or count % nodes):
        raise UsageError(f"{where}: num_processes {count} on num_machines {nodes}")
    environ = {}
    if file.get("use_cpu") or kind == "MULTI_CPU":
        environ["JAX_PLATFORMS"] = "cpu"
    ids = str(file.get("gpu_ids") or "all").replace(" ", "")
    if ids != "all":
        environ["CUDA_VISIBLE_DEVICES"] = ids
    each = None if count is None else str(count // nodes)
    deepspeed = file.get("deepspeed_config") or {}
    if not isinstance(deepspeed, dict):
        raise UsageError(f"{where}: deepspeed_config is {deepspeed!r}, and not keys and values")
    hostfile = deepspeed.get("deepspeed_hostfile")
    if nodes == 1 or hostfile:
        file_of_hosts = Path(hostfile) if nodes > 1 and hostfile else None
        return Given(each, None, None, None, file_of_hosts, environ, ignored)
    rank = _number(where, file, "machine_rank", 0) or 0
    address = file.get("main_process_ip")
    if not address:
        raise UsageError(f"{where}: num_machines {nodes} needs main_process_ip")
    if each is None:
        raise UsageError(f"{where}: num_machines {nodes} needs num_processes")
    port = _number(where, file, "main_process_port", _PORT)
    return Given(each, nodes, rank, f"{address}:{port}", None, environ, ignored)


def _ignored(file: dict[str, Any]) -> list[str]:
    lines = []
    off: tuple[Any, ...] = (None, False, "no", "", {}, [], "NO")
    if names := [key for key in _TRAINING if file.get(key) not in off]:
        lines.append(f"{', '.join(names)}: no effect here; the config of zerojax.zero says it")
    tpu = [key for key in _UNUSED if key.startswith(("tpu_", "mpirun", "megatron", "command"))]
    if names := [key for key in tpu if file.get(key) not in off]:
        lines.append(f"{', '.join(names)}: no effect here")
    return lines


def _number(where: str, file: dict[str, Any], key: str, default: int) -> int | None:
    value = file.get(key, default)
    if value is None:
        return default
    if isinstance(value, bool) or not str(value).lstrip("-").isdecimal():
        raise UsageError(f"{where}: {key} is {value!r}, not a number")
    return int(value)
