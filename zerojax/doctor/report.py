"""A report on this machine: devices, versions, settings, extras, and the outcome of checks.

``zerojax report`` prints it; DeepSpeed's counterpart is ``ds_report``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax

from zerojax.doctor.checks import CHECKS, Check, Try, in_one_line, tried
from zerojax.doctor.packages import Extra, Package, extras, packages


class Variable(NamedTuple):
    """An environment variable: its name, its effect, and the default if it is not set."""

    name: str
    sets: str
    default: str


SETTINGS = (
    Variable("JAX_PLATFORMS", "backends that JAX may start, the first is the default", "all"),
    Variable("JAX_NUM_CPU_DEVICES", "virtual devices of the CPU, to try several", "one"),
    Variable("JAX_OPTIMIZATION_LEVEL", "O0 to O3: how hard XLA tries", "XLA's own choice"),
    Variable("JAX_COMPILATION_CACHE_DIR", "keeps compiled programs for the next run", "none kept"),
    Variable("CUDA_VISIBLE_DEVICES", "GPUs that the process sees", "all"),
    Variable(
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "whether JAX takes its share of a GPU's memory when it starts",
        "true; this command sets false for itself",
    ),
    Variable(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "that share, the most that a program can use; 0.95 where no other program runs",
        "0.75, a quarter of each GPU is out of reach",
    ),
    Variable("XLA_CLIENT_MEM_FRACTION", "the newer name of the same; set one of them", "as above"),
    Variable("XLA_FLAGS", "flags of XLA; an unknown one ends the process", "none"),
)


@dataclass(frozen=True)
class Devices:
    """The devices of one kind.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: The kind's name.
      count: The number of devices, over all processes.
      processes: The number of processes that own the devices.
      memories: The kinds of memory that the devices can address, such as "device", "pinned_host".
      limit: Bytes that a program can use on each device; None if the devices do not report them.
      in_use: Bytes that this process uses on its fullest device.
      driver: The backend's platform version, with the version of CUDA or libtpu.
      capability: The compute capability of a GPU.
    """

    platform: str
    kind: str
    count: int
    processes: int
    memories: tuple[str, ...]
    limit: int | None = None
    in_use: int | None = None
    driver: str = ""
    capability: str = ""


@dataclass(frozen=True)
class Setting:
    """One environment variable: its value (None if not set), and its effect or default as text."""

    name: str
    value: str | None
    says: str


@dataclass(frozen=True)
class Report:
    """A report on this machine.

    Attributes:
      python: Python's version, and the machine.
      devices: One entry per device kind of the default backend; empty if JAX finds no devices.
      packages: zerojax, its requirements, and the installed compilers.
      settings: The environment variables that matter.
      extras: The extras of zerojax.
      works: The outcomes of the checks; empty without devices.
      problem: The reason why JAX finds no devices, else None.
    """

    python: str
    devices: tuple[Devices, ...]
    packages: tuple[Package, ...]
    settings: tuple[Setting, ...]
    extras: tuple[Extra, ...]
    works: tuple[Check, ...]
    problem: str | None = None


def report(environment: Mapping[str, str] | None = None, checks: Iterable[Try] = CHECKS) -> Report:
    """Returns a report on this machine; takes seconds and a few MB of device memory.

    The call starts JAX's backends. In a program of several processes, every process must call this
    function.

    Args:
      environment: The environment variables; None for those of this process.
      checks: The checks to run.

    Example:
      >>> found = report({"JAX_PLATFORMS": "cpu"}, checks=())
      >>> found.devices[0].platform, found.settings[0].value
      ('cpu', 'cpu')
    """
    problem = None
    try:
        found = devices()
    except Exception as error:  # some of jax's errors have another type, and no text
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        remedy = f": JAX_PLATFORMS asks for {asked!r}, leave it unset or say cpu" if asked else ""
        found, problem = (), f"{in_one_line(error)}{remedy}"
    return Report(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        devices=found,
        packages=packages(),
        settings=settings(os.environ if environment is None else environment),
        extras=extras(),
        works=tried(checks) if found else (),
        problem=problem,
    )


def devices() -> tuple[Devices, ...]:
    """Returns the devices of the default backend, by kind.

    Raises:
      RuntimeError: JAX finds no devices; the message has the reason.

    Example:
      >>> devices()[0].memories
      ('device', 'pinned_host', 'unpinned_host')
    """
    kinds: dict[tuple[str, str], list[jax.Device]] = {}
    for device in jax.devices():
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    return tuple(_of_kind(group) for group in kinds.values())


def _of_kind(group: list[jax.Device]) -> Devices:
    first = group[0]
    local = [device for device in group if device.process_index == jax.process_index()]
    stats = [_memory(device) for device in local]
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
    used = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    return Devices(
        platform=first.platform,
        kind=first.device_kind,
        count=len(group),
        processes=len({device.process_index for device in group}),
        memories=tuple(sorted({m.kind for d in local for m in d.addressable_memories()})),
        limit=min(limits, default=None),
        in_use=max(used, default=None),
        driver=", ".join(first.client.platform_version.split("\n")),
        capability=str(getattr(first, "compute_capability", "")),
    )


def _memory(device: jax.Device) -> Mapping[str, int]:
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}  # some backends do not report their memory


def settings(environment: Mapping[str, str]) -> tuple[Setting, ...]:
    """Returns the environment variables that matter, with the default of each one not set.

    Example:
      >>> found = {s.name: s for s in settings({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"})}
      >>> found["XLA_PYTHON_CLIENT_MEM_FRACTION"].value, found["JAX_PLATFORMS"].value
      ('0.9', None)
    """
    return tuple(
        Setting(name, value, sets if value is not None else f"{sets}; not set: {default}")
        for name, sets, default in SETTINGS
        for value in [environment.get(name)]
    )
