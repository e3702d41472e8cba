"""What is checked before JAX joins the processes, and once their devices are known.

Each process describes itself in a record; every process compares all records and comes to the
same error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import ipaddress
import os
import socket
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from zerojax.config import ZeroConfig
from zerojax.distributed.launched import Launched
from zerojax.distributed.roll_call import Record, by_host, listed, split

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""As gRPC looks for them; capital letters mean nothing to it."""
_UNEQUAL_MEMORY = 0.05
"""The share by which the memories of devices may differ."""


def describe(me: Launched, config: ZeroConfig | None, environ: Mapping[str, str]) -> Record:
    """This process's record, before JAX is used."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "zerojax")},
        "config": "" if config is None else config_hash(config),
        "gpus": None if _on_cpu() else visible_gpus(environ),
        "cpus": len(os.sched_getaffinity(0)),
        "all_cpus": os.cpu_count() or 1,
        "quota": _quota(),
        "proxy": _proxied(me, environ),
        "gloo_on_loopback": _on_cpu() and is_loopback(socket.gethostname()),
    }


def config_hash(config: ZeroConfig) -> str:
    """Equal for equal configs, in every process."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.compare}
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _on_cpu() -> bool:
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    has_plugin = importlib.util.find_spec("jax_plugins") and any(
        map(importlib.util.find_spec, plugins)
    )
    return platforms.split(",")[0] == "cpu" or not has_plugin


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order; None
    where the driver's tool does not answer."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    there = told.stdout.split()
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return there
    seen: list[str] = []
    for name in map(str.strip, wanted.split(",")):
        found = [g for n, g in enumerate(there) if name == str(n) or (name and g.startswith(name))]
        if not found and not name.startswith("MIG-"):
            break  # as CUDA does: what follows an unknown one is hidden too
        seen.append(found[0] if found else name)
    return seen


def _quota() -> float | None:
    """CPUs that the control group allows; None for no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def unreachable(me: Launched) -> str:
    """Why this process cannot reach process 0; "" for no known reason."""
    host = split(me.coordinator)[0]
    if not me.several_hosts or not is_loopback(host) or (me.index == 0 and _is_own_name(host)):
        return ""
    return (
        f"the coordinator {me.coordinator} ({me.by}) is the loopback of {socket.gethostname()} "
        "itself, but processes run on several hosts: name the host of process 0 by an address that "
        f"the others reach (`hostname -I` there); where /etc/hosts maps {host} to 127.*, correct it"
    )


def _is_own_name(host: str) -> bool:
    return host.partition(".")[0] == socket.gethostname().partition(".")[0]


def _proxied(me: Launched, environ: Mapping[str, str]) -> str:
    """The variable that would send gRPC through a proxy; "" for none."""
    spared = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    host = split(me.coordinator)[0]
    if any(host.endswith(end.strip()) for end in spared.split(",") if end.strip()):
        return ""
    return next((name for name in _PROXIES if environ.get(name)), "")


def is_loopback(host: str) -> bool:
    """Whether a name resolves to addresses of the machine itself alone."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # it may be known later, as Kubernetes' names are
    return all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


def differences(records: list[Record], coordinator: str) -> list[str]:
    """What keeps processes from being one job, before JAX is used."""
    problems = []
    if proxied := {r["index"]: r["proxy"] for r in records if r["proxy"]}:
        problems.append(
            f"{', '.join({*proxied.values()})} would send what {listed(proxied, 'process')} and "
            f"process 0 tell each other through a proxy: add the host of {coordinator} to "
            "no_proxy, or unset the variable"
        )
    hosts = by_host(records)
    if len(hosts) > 1 and (here := [each for each in records if each["gloo_on_loopback"]]):
        problems.append(
            f"/etc/hosts of {', '.join(by_host(here))} maps its own name to a loopback address, "
            "where gloo, which joins CPUs, waits for the other hosts in vain: map the name to the "
            "host's address in the network"
        )
    for name in records[0]["versions"]:
        problems += _unequal(
            f"the version of {name}",
            {r["index"]: r["versions"][name] for r in records},
            f"install the same {name} for all processes",
        )
    problems += unequal_configs([record["config"] for record in records])
    for host, numbers in hosts.items():
        try:
            local_devices([records[n] for n in numbers])
        except ValueError as error:
            problems.append(f"{listed(numbers, 'process')} on {host}: {error}")
    return problems


def unequal_configs(hashes: list[str]) -> list[str]:
    """An error where hashes of configs differ, those that are known."""
    known = {n: each for n, each in enumerate(hashes) if each}
    return _unequal("the config (its hash)", known, "give all processes the same config")


def local_devices(here: list[Record]) -> list[list[int] | None]:
    """For each process of a host the GPUs that are its own, as positions among those that are
    visible; None for all.

    Processes that see the same GPUs share them out evenly, in their order.

    Args:
      here: The records of the host's processes, in their order.

    Raises:
      ValueError: Too few, or none for some.

    Example:
      >>> local_devices([{"gpus": ["a", "b"]}, {"gpus": ["a", "b"]}])
      [[0], [1]]
    """
    sets = [record["gpus"] for record in here]
    if any(each is None for each in sets) or not any(sets):
        return [None] * len(here)
    hidden = [record["index"] for record in here if not record["gpus"]]
    if hidden:
        raise ValueError(
            f"no GPU is visible to {listed(hidden, 'process')}, and others see some: "
            "CUDA_VISIBLE_DEVICES hides them; unset it, or name a GPU of each process"
        )
    if len({*map(tuple, sets)}) == 1 and len(here) > 1:
        gpus = len(sets[0])
        if gpus < len(here):
            raise ValueError(
                f"{len(here)} processes see the same {gpus} GPU{'s' * (gpus > 1)}: start at most "
                "one process a GPU, or let CUDA_VISIBLE_DEVICES show all GPUs"
            )
        if gpus % len(here):
            raise ValueError(
                f"{gpus} GPUs cannot be shared evenly among {len(here)} processes: start one "
                "process a GPU, or set CUDA_VISIBLE_DEVICES for each"
            )
        each = gpus // len(here)
        return [[*range(n * each, (n + 1) * each)] for n in range(len(here))]
    uses = [uuid for seen in sets for uuid in seen]
    if len(uses) > len({*uses}):
        raise ValueError(
            "some see a GPU that another sees too, and not the same ones: set CUDA_VISIBLE_DEVICES "
            "to the own GPUs of each process, or unset it for all"
        )
    return [None] * len(here)


def cpu_warnings(records: list[Record]) -> list[str]:
    """Hosts whose processes have so few CPUs that they hinder each other."""
    found = []
    for host, numbers in by_host(records).items():
        here = [records[n] for n in numbers]
        bound = [r["index"] for r in here if r["cpus"] == 1 < r["all_cpus"] // len(here)]
        quota = min((r["quota"] for r in here if r["quota"]), default=None)
        if bound:
            found.append(
                f"{listed(bound, 'process')} on {host} may use one CPU of {here[0]['all_cpus']}, "
                "where XLA's, the loader's and the checkpoint's threads meet: srun "
                "--cpus-per-task=N, mpirun --bind-to none"
            )
        elif (cpus := min(here[0]["all_cpus"], quota or here[0]["all_cpus"])) < len(here):
            found.append(
                f"{len(here)} processes on {host} share {cpus:g} CPUs: start fewer processes, "
                "with several devices each, or ask for more CPUs"
            )
    return found


def devices_here(devices: Iterable[jax.Device]) -> Record:
    """The record of a process's devices."""
    group = [*devices]
    memory = []
    for device in group:
        with contextlib.suppress(jax.errors.JaxRuntimeError, NotImplementedError):
            memory.append((device.memory_stats() or {}).get("bytes_limit"))
    limits = [each for each in memory if each]
    return {
        "count": len(group),
        "kind": f"{group[0].platform} {group[0].device_kind}",
        "memory": min(limits, default=None),
    }


def unequal_devices(records: list[Record]) -> list[str]:
    """What keeps devices of several processes from one mesh."""
    problems = _unequal(
        "the kind of device",
        {n: r["kind"] for n, r in enumerate(records)},
        "use machines of one kind, or name the backend with JAX_PLATFORMS in all processes",
    )
    problems += _unequal(
        "the number of devices",
        {n: r["count"] for n, r in enumerate(records)},
        "give all processes as many: CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES",
    )
    memories = {n: r["memory"] for n, r in enumerate(records) if r["memory"]}
    if memories and min(memories.values()) < (1 - _UNEQUAL_MEMORY) * max(memories.values()):
        problems += _unequal(
            "the memory of a device that JAX may use",
            {n: f"{bytes_ / 1e9:.1f} GB" for n, bytes_ in memories.items()},
            "end other programs on the smaller ones, or set XLA_PYTHON_CLIENT_MEM_FRACTION alike",
        )
    return problems


def _unequal(what: str, values: Mapping[int, Any], remedy: str) -> list[str]:
    """An error where values differ, with the processes of each."""
    groups: dict[Any, list[int]] = {}
    for process, value in values.items():
        groups.setdefault(value, []).append(process)
    if len(groups) < 2:
        return []
    each = "; ".join(f"{value} in {listed(who, 'process')}" for value, who in groups.items())
    return [f"{what} differs: {each}. Remedy: {remedy}"]
