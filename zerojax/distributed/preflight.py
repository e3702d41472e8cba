"""Checks before JAX joins the processes, and once their devices are known.

Each process describes itself in a record; every process compares all records and raises the same
error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import socket
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import jax

from zerojax.config import ZeroConfig
from zerojax.distributed.addresses import is_loopback
from zerojax.distributed.gpus import installed_gpus, local_devices, visible_gpus
from zerojax.distributed.roll_call import Record, by_host, format_indices, unequal

_OWN = ("steps_per_print", "wall_clock_breakdown", "tensorboard", "csv_monitor", "wandb")
"""Config fields that a program may set only in process 0."""


def describe(config: ZeroConfig | None, environ: Mapping[str, str]) -> Record:
    """Returns this process's record, before JAX is used."""
    gpus = None if _is_on_cpu() else installed_gpus()
    if gpus is not None:
        gpus = visible_gpus(environ, gpus)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "zerojax")},
        "settings": {} if config is None else settings(config),
        "gpus": gpus and [gpu.uuid for gpu in gpus],
        "gloo_on_loopback": _is_on_cpu() and is_loopback(socket.gethostname()),
    }


def _is_on_cpu() -> bool:
    """Returns whether JAX will start only CPUs, without starting its backends."""
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    has_plugin = importlib.util.find_spec("jax_plugins") and any(
        map(importlib.util.find_spec, plugins)
    )
    return platforms.split(",")[0] == "cpu" or not has_plugin


def settings(config: ZeroConfig) -> dict[str, str]:
    """Returns the fields that must be equal in all processes, as strings."""
    fields = (f.name for f in dataclasses.fields(config) if f.compare and f.name not in _OWN)
    return {name: str(_plain(getattr(config, name))) for name in fields}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = (f.name for f in dataclasses.fields(value) if f.name != "nvme_path")
        return {name: _plain(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in sorted(value)}
    return value


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def differences(records: list[Record]) -> list[str]:
    """Lists the problems that keep processes from being one job, before JAX is used."""
    versions = {record["index"]: record["versions"] for record in records}
    remedy = "install the same {} for all processes"
    # The records of other versions may have other keys.
    if problems := _unequal("the version of {}", versions, remedy):
        return problems
    hosts = by_host(records)
    if len(hosts) > 1 and (here := [each for each in records if each["gloo_on_loopback"]]):
        problems.append(
            f"/etc/hosts of {', '.join(by_host(here))} maps its own name to a loopback "
            "address, where gloo never hears other hosts: map the name to the host's "
            "address in the network"
        )
    problems += unequal_settings([record["settings"] for record in records])
    for host, numbers in hosts.items():
        try:
            local_devices([records[n] for n in numbers])
        except ValueError as error:
            problems.append(f"{format_indices(numbers, 'process')} on {host}: {error}")
    return problems


def unequal_settings(each: list[dict[str, str]]) -> list[str]:
    """Lists the settings that differ between the processes with a known config."""
    known = {n: settings for n, settings in enumerate(each) if settings}
    return _unequal("{} of the config", known, "give all processes the same config")


def devices_here(devices: Iterable[jax.Device]) -> Record:
    """Returns the record of a process's devices."""
    group = [*devices]
    return {"count": len(group), "kind": f"{group[0].platform} {group[0].device_kind}"}


def unequal_devices(records: list[Record]) -> list[str]:
    """Lists the problems that keep devices of several processes from one mesh."""
    kinds = {n: {"kind": record["kind"]} for n, record in enumerate(records)}
    counts = {n: {"number": record["count"]} for n, record in enumerate(records)}
    backend = "use machines of one kind, or name the backend with JAX_PLATFORMS in all processes"
    number = "give all processes as many: CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES"
    by_kind = _unequal("the {} of device", kinds, backend)
    return by_kind + _unequal("the {} of devices", counts, number)


def _unequal(what: str, each: Mapping[int, Mapping[str, Any]], remedy: str) -> list[str]:
    """Returns an error for each name whose values differ; ``{}`` stands for the name."""
    return [
        f"{what.format(name)} differs: "
        f"{'; '.join(f'{value} in {who}' for value, who in groups.items())}. "
        f"Remedy: {remedy.format(name)}"
        for name, groups in unequal(each).items()
    ]
