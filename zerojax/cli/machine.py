"""This machine: its devices, and the versions of zerojax and of what it requires."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import jax
from packaging.requirements import Requirement

NAME = "zerojax"
COMPILERS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu")
"""Compiler packages, listed if installed; jax finds them by itself."""


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
class Package:
    """One package.

    Attributes:
      name: The name for pip.
      version: The installed version, None if not installed.
      wanted: The versions that zerojax accepts, "" for any.
    """

    name: str
    version: str | None
    wanted: str = ""


@dataclass(frozen=True)
class Machine:
    """The devices and the packages of this machine.

    Attributes:
      python: Python's version, and the machine.
      devices: One entry per device kind of the default backend; empty if JAX finds no devices.
      packages: zerojax, its requirements, and the installed compilers.
      problem: The reason why JAX finds no devices, else None.
    """

    python: str
    devices: tuple[Devices, ...]
    packages: tuple[Package, ...]
    problem: str | None = None


def machine() -> Machine:
    """Returns the devices and the packages of this machine.

    The call starts JAX's backends. In a program of several processes, every process must call this
    function.

    Example:
      >>> [each.platform for each in machine().devices]
      ['cpu']
    """
    problem = None
    try:
        found = devices()
    except Exception as error:  # some of jax's errors have another type, and no text
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        remedy = f": JAX_PLATFORMS asks for {asked!r}, leave it unset or say cpu" if asked else ""
        found, problem = (), f"{_in_one_line(error)}{remedy}"
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Machine(python, found, (*packages(),), problem)


def packages() -> Iterator[Package]:
    """Yields zerojax, its requirements on this Python, and the installed compilers.

    The requirements are not known if zerojax runs from its folder without being installed.
    """
    yield Package(NAME, own := _version(NAME))
    for requirement in map(Requirement, (metadata.requires(NAME) or ()) if own else ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version, wanted = _version(requirement.name), str(requirement.specifier)
            yield Package(requirement.name, version, wanted)
    for name in COMPILERS:
        if version := _version(name):
            yield Package(name, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
    return tuple(map(_of_kind, kinds.values()))


def _of_kind(group: list[jax.Device]) -> Devices:
    first = group[0]
    local = [device for device in group if device.process_index == jax.process_index()]
    limits = [n for device in local if (n := (device.memory_stats() or {}).get("bytes_limit"))]
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


def _in_one_line(error: Exception) -> str:
    """Returns an error as one line, with its type if the text by itself is too vague."""
    text = " ".join(str(error).split())
    is_plain = isinstance(error, ValueError | ImportError | RuntimeError)
    return text if is_plain and text else f"{type(error).__name__}: {text}".removesuffix(": ")
