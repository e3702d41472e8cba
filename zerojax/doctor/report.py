"""A report on this machine: devices, versions, extras, and the variables that are set.

``zerojax report`` prints it; DeepSpeed's counterpart is ``ds_report``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from zerojax.doctor.packages import Extra, Package, extras, packages

_VARIABLES = ("JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "NCCL_", "LIBTPU_", "ZEROJAX_")


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
      driver: The backend's platform version, with the version of CUDA or libtpu.
      capability: The compute capability of a GPU.
    """

    platform: str
    kind: str
    count: int
    processes: int
    memories: tuple[str, ...]
    limit: int | None = None
    driver: str = ""
    capability: str = ""


@dataclass(frozen=True)
class Report:
    """A report on this machine.

    Attributes:
      python: Python's version, and the machine.
      devices: One entry per device kind of the default backend; empty if JAX finds no devices.
      packages: zerojax, its requirements, and the installed compilers.
      environment: The variables of JAX, XLA, CUDA, NCCL and zerojax that are set.
      extras: The extras of zerojax.
      problem: The reason why JAX finds no devices, else None.
    """

    python: str
    devices: tuple[Devices, ...]
    packages: tuple[Package, ...]
    environment: Mapping[str, str]
    extras: tuple[Extra, ...]
    problem: str | None = None


def report(environment: Mapping[str, str] | None = None) -> Report:
    """Returns a report on this machine.

    The call starts JAX's backends. In a program of several processes, every process must call this
    function.

    Args:
      environment: The environment variables; None for those of this process.

    Example:
      >>> found = report({"JAX_PLATFORMS": "cpu", "HOME": "/"})
      >>> found.devices[0].platform, found.environment
      ('cpu', {'JAX_PLATFORMS': 'cpu'})
    """
    problem, given = None, os.environ if environment is None else environment
    try:
        found = devices()
    except Exception as error:  # some of jax's errors have another type, and no text
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        remedy = f": JAX_PLATFORMS asks for {asked!r}, leave it unset or say cpu" if asked else ""
        found, problem = (), f"{_in_one_line(error)}{remedy}"
    return Report(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        devices=found,
        packages=packages(),
        environment={name: x for name, x in given.items() if name.startswith(_VARIABLES)},
        extras=extras(),
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
    return Devices(
        platform=first.platform,
        kind=first.device_kind,
        count=len(group),
        processes=len({device.process_index for device in group}),
        memories=tuple(sorted({m.kind for d in local for m in d.addressable_memories()})),
        limit=min(limits, default=None),
        driver=", ".join(first.client.platform_version.split("\n")),
        capability=str(getattr(first, "compute_capability", "")),
    )


def _memory(device: jax.Device) -> Mapping[str, int]:
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}  # some backends do not report their memory


def _in_one_line(error: Exception) -> str:
    """Returns an error as one line, with its type if the text by itself is too vague."""
    text = " ".join(str(error).split())
    is_plain = isinstance(error, ValueError | ImportError | RuntimeError)
    return text if is_plain and text else f"{type(error).__name__}: {text}".removesuffix(": ")
