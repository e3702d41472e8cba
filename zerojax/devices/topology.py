"""Meshes of absent devices, to compile for them on any machine.

    mesh = zerojax.topology("h100", devices=8)
    lowered = zerojax.zero(config, mesh=mesh)(train_step).lower(state, batch)
    lowered.compile().memory_analysis()

Nothing can be placed or run on such a mesh. It is for ``lower().compile()``, which then has the
memory, collectives and time of the named device. The figures of each device are in
``device_kinds.json``.
"""

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any, Literal, cast

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from zerojax.devices.mesh import axis_sizes

GPUS_PER_HOST = 8
TPUS_PER_HOST = 4

MOST = 2**17
"""The most devices of a mesh; JAX takes half a minute to make a mesh of that size."""

# The device description of XLA's GPU compiler (GpuTargetConfigProto), in protobuf's text format.
_GPU_TARGET = Template("""
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: $threads_per_core
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 device_address_bits: 64
  shared_memory_per_core: $shared_memory_per_core
  shared_memory_per_block_optin: $shared_memory_per_block_optin
  core_count: $core_count fpus_per_core: $fpus_per_core clock_rate_ghz: $clock_rate_ghz
  memory_bandwidth: $memory_bandwidth device_memory_size: $device_memory_size
  l2_cache_size: $l2_cache_size pcie_bandwidth: $pcie_bandwidth
  cuda_compute_capability { major: $major minor: $minor $feature_extension }
  device_interconnect_info { active_links: $active_links }
  device_vendor: "NVIDIA Corporation" name: "$name"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "$name"
""")


def topology(
    name: str,
    devices: int = 8,
    *,
    axes: Mapping[str, int] | str | None = None,
    replicas: int | Literal["hosts"] | None = None,
) -> Mesh:
    """Returns a mesh of ``devices`` devices of the kind ``name``, none of which need to exist.

    Two meshes of equally many devices of one kind have the same devices.

    Args:
      name: ``"h100"``, ``"h200"``, ``"a100"`` (80 GB), ``"a100-40gb"``, ``"b200"``,
        ``"b300"``, ``"gb200"``, ``"gb300"``, ``"l40s"``, ``"l4"``, ``"a10g"``,
        ``"titan-rtx"``, ``"rtx-3090"``, ``"rtx-4090"``, ``"v5e"``, ``"v5p"`` or ``"v6e"``.
      devices: number of devices. A node has 8 GPUs (72 of GB200 and GB300), so a number above 8
        must be a multiple of 8; a host has 4 TPU chips, so the number must be a multiple of 4.
      axes: sizes by axis name, outermost first, or the same as text (``"data=4,model=2"``); their
        product is ``devices``. By default one ``"data"`` axis over all devices.
      replicas: replica groups in place of ``axes``, as for :func:`zerojax.mesh`.

    Raises:
      ValueError: the kind is unknown, the number does not fill complete hosts, or the axes or
        replicas do not multiply out to it.
      ImportError: the compiler's wheels are not installed.
      RuntimeError: the CUDA plugin is installed, but JAX could not load it in this process.

    Example::

      zerojax.topology("h100", devices=64, axes={"data": 8, "model": 8})
      zerojax.topology("h100", devices=64, replicas="hosts")  # 8 groups of 8
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or not 0 < devices <= MOST:
        raise ValueError(f"devices must be an int from 1 to {MOST:,}")
    kind, figures = lookup(name)
    family = "gpu" if kind in device_kinds()["gpu"] else "tpu"
    per_node = gpus_per_node(figures) if family == "gpu" else TPUS_PER_HOST
    sizes = axis_sizes(devices, axes, replicas, max(1, devices // per_node))
    absent = _gpus(name, figures, devices) if family == "gpu" else _tpus(name, figures, devices)
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=absent,
    )


@functools.cache
def device_kinds() -> dict[str, Any]:
    """Returns the figures of every known device, from ``device_kinds.json``."""
    figures = resources.files("zerojax.devices").joinpath("device_kinds.json")
    return cast("dict[str, Any]", json.loads(figures.read_text()))


def lookup(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the canonical name of a kind, for which ``name`` may be an alias, and its figures.

    Raises:
      ValueError: the kind is unknown, or XLA has no compiler for it.
    """
    kinds = device_kinds()
    wanted = name.lower() if isinstance(name, str) else name
    wanted = kinds["aliases"].get(wanted, wanted)
    for family in ("gpu", "tpu"):
        if wanted in kinds[family]:
            return wanted, kinds[family][wanted]
    if wanted in kinds["refused"]:
        raise ValueError(f"device kind {name!r}: {kinds['refused'][wanted]}")
    known = [*kinds["gpu"], *kinds["tpu"], *kinds["aliases"]]
    close = difflib.get_close_matches(str(wanted), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown device kind {name!r}.{hint} Known: {', '.join(sorted(known))}")


def gpus_per_host(figures: Mapping[str, Any]) -> int:
    """Returns the GPUs that share a host's memory, from the figures of their kind."""
    return cast(int, figures.get("gpus_per_host", GPUS_PER_HOST))


def gpus_per_node(figures: Mapping[str, Any]) -> int:
    """Returns the GPUs that fast links join: those of a host, or of several hosts with NVLink."""
    return cast(int, figures.get("gpus_per_node", gpus_per_host(figures)))


def _node(figures: Mapping[str, Any]) -> str:
    return "NVLink domains" if "gpus_per_node" in figures else "hosts"


def _gpus(name: str, figures: Mapping[str, Any], devices: int) -> Sequence[jax.Device]:
    per_node = gpus_per_node(figures)
    if devices > per_node and devices % per_node:
        raise ValueError(
            f"devices={devices} is not a multiple of {_node(figures)} of {per_node} GPUs: take "
            f"{_neighbours(devices, per_node)}, or at most {per_node}"
        )
    if _missing("jax_plugins.xla_cuda13") and _missing("jax_plugins.xla_cuda12"):
        raise ImportError(
            f"compiling for {name!r} needs XLA's compiler: pip install -e '.[compile]'"
        )
    nodes = max(1, devices // per_node)
    try:
        return _described(
            platform="cuda",
            target_config=_target_config(figures),
            topology=f"1x{nodes}x{devices // nodes}",  # partitions x nodes x GPUs a node
        )
    except NotImplementedError as error:
        raise RuntimeError(_plugin_remedy(name)) from error


@functools.cache
def _described(**description: str) -> Sequence[jax.Device]:
    """Returns the devices of a topology, the same objects for the same description.

    JAX creates new devices on each call, and refuses to mix arrays and specs of different devices.
    """
    return topologies.get_topology_desc(**description).devices


def _target_config(figures: Mapping[str, Any]) -> str:
    major, minor = figures["capability"]
    extension = "feature_extension: ACCELERATED_FEATURES" if figures["accelerated_features"] else ""
    return _GPU_TARGET.substitute(figures, major=major, minor=minor, feature_extension=extension)


def _plugin_remedy(name: str) -> str:
    versions = {
        package: importlib.metadata.version(package)
        for package in ("jax", "jax-cuda13-plugin")
        if not _missing(package.replace("-", "_"))
    }
    if len(set(versions.values())) > 1:
        installed = ", ".join(f"{package} {version}" for package, version in versions.items())
        return f"the CUDA plugin's version must equal jax's, found {installed}: " + (
            "pip install -e '.[compile]'"
        )
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    return (
        f"XLA's CUDA plugin did not load, so there is no compiler for {name!r}. Without a GPU set "
        "JAX_PLATFORMS=cpu, or call jax.config.update('jax_platforms', 'cpu'), before JAX is first "
        f"used in this process (jax_platforms is {platforms!r})"
    )


def _tpus(name: str, figures: Mapping[str, Any], devices: int) -> Sequence[jax.Device]:
    if devices % TPUS_PER_HOST:
        raise ValueError(
            f"devices={devices} is not a multiple of hosts of {TPUS_PER_HOST} {name} chips: take "
            f"{_neighbours(devices, TPUS_PER_HOST)}"
        )
    if _missing("libtpu"):
        raise ImportError(f"compiling for {name!r} needs libtpu: pip install -e '.[tpu]'")
    torus = "x".join(map(str, _torus(devices, figures["torus_rank"])))
    with _libtpu_unlocked():
        return _described(platform="tpu", topology_name=f"{name.lower()}:{torus}")


@contextlib.contextmanager
def _libtpu_unlocked() -> Iterator[None]:
    """Sets the variable that lets several processes load libtpu, only during the load.

    libtpu reads the variable from the process's environment, and otherwise locks the machine for
    one process; a compile holds no chip and needs no lock.
    """
    name = "ALLOW_MULTIPLE_LIBTPU_LOAD"
    absent = name not in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if absent:
            del os.environ[name]


def _torus(chips: int, rank: int) -> tuple[int, ...]:
    """Splits ``chips`` into ``rank`` nearly equal sides, the first two even, as hosts are 2x2."""
    hosts, sides = chips // TPUS_PER_HOST, [2, 2, 1][:rank]
    for factor in sorted(_prime_factors(hosts), reverse=True):
        sides[sides.index(min(sides))] *= factor
    return tuple(sorted(sides, key=lambda side: (side % 2, side)))


def _prime_factors(number: int) -> list[int]:
    factors, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return factors


def _neighbours(devices: int, multiple: int) -> str:
    below = devices // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True
