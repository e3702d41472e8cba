"""What is here: devices, versions, settings, extras, and what works with them.

It is what DeepSpeed's ``ds_report`` tells of a machine; ``python -m zerojax report`` prints it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from zerojax.doctor.checks import CHECKS, Check, Try, told, tried
from zerojax.doctor.packages import Extra, Package, extras, packages

SETTINGS = (
    ("JAX_PLATFORMS", "backends that JAX may start, the first is the default", "all there are"),
    ("JAX_NUM_CPU_DEVICES", "virtual devices of the CPU, to try several", "one"),
    ("JAX_OPTIMIZATION_LEVEL", "O0 to O3: how hard XLA tries", "XLA's own choice"),
    ("JAX_COMPILATION_CACHE_DIR", "keeps compiled programs for the next run", "none are kept"),
    ("CUDA_VISIBLE_DEVICES", "GPUs that the process sees", "all"),
    (
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "whether JAX takes its share of a GPU's memory when it starts",
        "true; this command sets false for itself",
    ),
    (
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "that share, the most that a program can use; 0.95 gives more to one that is alone",
        "0.75, a quarter of each GPU is out of reach",
    ),
    ("XLA_CLIENT_MEM_FRACTION", "the newer name of the same; set one of them", "as above"),
    ("XLA_FLAGS", "flags of XLA; one that it does not know ends the process", "none"),
)
"""Environment variables: name, what it sets, and what holds where it is not set."""


@dataclass(frozen=True)
class Devices:
    """The devices of one kind, as JAX tells of them.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the device's name.
      count: how many, over all processes.
      processes: how many processes they belong to.
      memories: kinds of memory they reach, as "device", "pinned_host".
      limit: bytes that a program can use on each, None where the device does not say.
      in_use: bytes that this process uses on the fullest.
      driver: what the backend says of itself, with the version of CUDA or libtpu.
      capability: the compute capability of a GPU.
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
    """One environment variable; ``value`` is None where it is not set, and ``says`` what holds."""

    name: str
    value: str | None
    says: str


@dataclass(frozen=True)
class Report:
    """What is here.

    Attributes:
      python: its version and the machine.
      devices: one entry a kind, the default backend's; empty where JAX finds none.
      packages: what zerojax needs, and the compilers.
      settings: the environment.
      extras: what can be installed beside it.
      works: what was tried; nothing where there are no devices.
      problem: why there are no devices, else None.
    """

    python: str
    devices: tuple[Devices, ...]
    packages: tuple[Package, ...]
    settings: tuple[Setting, ...]
    extras: tuple[Extra, ...]
    works: tuple[Check, ...]
    problem: str | None = None


def report(environment: Mapping[str, str] | None = None, checks: Iterable[Try] = CHECKS) -> Report:
    """Looks at what is here and tries what works; takes seconds, and no more than a few MB.

    It starts JAX's backends. In a program of several processes each of them calls it.

    Args:
      environment: the variables to tell of; those of the process by default.
      checks: what to try, each a name and a function that raises where it does not work.

    Example:
      >>> found = report({"JAX_PLATFORMS": "cpu"}, checks=())
      >>> found.devices[0].platform, found.settings[0].value
      ('cpu', 'cpu')
    """
    problem = None
    try:
        there = devices()
    except Exception as error:  # some of jax's have another type, and no text
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        remedy = f": JAX_PLATFORMS asks for {asked!r}, leave it unset or say cpu" if asked else ""
        there, problem = (), f"{told(error)}{remedy}"
    return Report(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        devices=there,
        packages=packages(),
        settings=settings(os.environ if environment is None else environment),
        extras=extras(),
        works=tried(checks) if there else (),
        problem=problem,
    )


def devices() -> tuple[Devices, ...]:
    """The devices of the default backend, by kind.

    Raises:
      RuntimeError: JAX finds none, and says why.

    Example:
      >>> devices()[0].memories
      ('device', 'pinned_host', 'unpinned_host')
    """
    kinds: dict[tuple[str, str], list[jax.Device]] = {}
    for device in jax.devices():
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    return tuple(_told_of(group) for group in kinds.values())


def _told_of(group: list[jax.Device]) -> Devices:
    first = group[0]
    near = [device for device in group if device.process_index == jax.process_index()]
    stats = [_memory(device) for device in near]
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
    used = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    return Devices(
        platform=first.platform,
        kind=first.device_kind,
        count=len(group),
        processes=len({device.process_index for device in group}),
        memories=tuple(sorted({m.kind for d in near for m in d.addressable_memories()})),
        limit=min(limits, default=None),
        in_use=max(used, default=None),
        driver=", ".join(first.client.platform_version.split("\n")),
        capability=str(getattr(first, "compute_capability", "")),
    )


def _memory(device: jax.Device) -> Mapping[str, int]:
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return {}  # some backends do not count


def settings(environment: Mapping[str, str]) -> tuple[Setting, ...]:
    """What the environment sets, and what holds where it does not.

    Example:
      >>> found = {s.name: s for s in settings({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"})}
      >>> found["XLA_PYTHON_CLIENT_MEM_FRACTION"].value, found["JAX_PLATFORMS"].value
      ('0.9', None)
    """
    return tuple(
        Setting(name, value, sets if value is not None else f"{sets}; not set: {holds}")
        for name, sets, holds in SETTINGS
        for value in [environment.get(name)]
    )
