"""The place of each part of the state: the device, the host's memory, or a disk.

======================  ====================  ====================  ========================
                        moments               masters               compute parameters
======================  ====================  ====================  ========================
no offload              device                device                device
offload_optimizer       its device            its device            device
offload_param (only)    device                its device            its device
both                    offload_optimizer's   offload_optimizer's   offload_param's
======================  ====================  ====================  ========================

Masters are the parameters at rest. Compute parameters of fewer elements than
``stage3_param_persistence_threshold``, which are replicated, stay on the device. A parameter of one
element stays on the device with its moments and its compute copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from zerojax.config import OffloadOptimizer, OffloadParam, ZeroConfig
from zerojax.devices.mesh import are_present

DEVICE, HOST, DISK = "device", "host", "disk"
PINNED = "pinned_host"
_PLACES = {"cpu": HOST, "nvme": DISK}


class Places(NamedTuple):
    """The places of one parameter's parts at rest: DEVICE, HOST or DISK each.

    Attributes:
      master: the parameter itself, in full precision.
      moments: the optimizer state that belongs to it.
      compute: the parameter as the step computes with it.
    """

    master: str
    moments: str
    compute: str


def choose_places(config: ZeroConfig, elements: Sequence[int]) -> list[Places]:
    """Chooses the places of each parameter from the parameters' numbers of elements.

    With ``ratio`` below 1 the smallest parameters keep their optimizer state on the device, as
    many as fit into the share ``1 - ratio`` of all elements. With ``max_in_cpu`` the smallest
    compute parameters are in host memory, and the others on disk.
    """
    optimizer, param = config.offload_optimizer, config.offload_param
    on_device: set[int] = set()
    if optimizer is not None and optimizer.ratio < 1:
        on_device = _fitting(elements, (1 - optimizer.ratio) * sum(elements))
    in_cpu: set[int] = set()
    if param is not None and param.device == "nvme":
        in_cpu = _fitting(elements, param.max_in_cpu)
    chosen = []
    for i, n in enumerate(elements):
        if n == 1:
            chosen.append(Places(DEVICE, DEVICE, DEVICE))
            continue
        small = n < config.stage3_param_persistence_threshold
        compute = DEVICE if param is None or small else _PLACES[param.device]
        compute = HOST if i in in_cpu and compute == DISK else compute
        moments = DEVICE if optimizer is None or i in on_device else _PLACES[optimizer.device]
        master = compute if optimizer is None else moments
        chosen.append(Places(master, moments, compute))
    return chosen


def _fitting(elements: Sequence[int], room: float) -> set[int]:
    """Picks the smallest parameters, as many as there is room for."""
    chosen = set()
    for i in sorted(range(len(elements)), key=lambda i: elements[i]):
        if elements[i] <= room:
            chosen.add(i)
            room -= elements[i]
    return chosen


def offloads(config: ZeroConfig) -> bool:
    """Returns whether any part of the state is stored elsewhere than on the device."""
    return config.offload_optimizer is not None or config.offload_param is not None


def disk_sections(config: ZeroConfig) -> list[OffloadOptimizer | OffloadParam]:
    """Returns the offload sections whose part of the state is stored on disk."""
    sections = config.offload_optimizer, config.offload_param
    return [section for section in sections if section is not None and section.device == "nvme"]


def reaches_host(config: ZeroConfig) -> bool:
    """Returns whether a program of the step may have arrays in host memory."""
    return offloads(config) or config.cpu_checkpointing


def check_memories(config: ZeroConfig, mesh: Mesh) -> None:
    """Rejects offload if the devices have no pinned host memory.

    Raises:
      ValueError: names the platform and the memories that it has.
    """
    requested = [
        name
        for name in ("offload_optimizer", "offload_param", "cpu_checkpointing")
        if getattr(config, name)
    ]
    device = mesh.devices.flat[0]
    # JAX knows no memories of absent devices.
    if not requested or not are_present(mesh):
        return
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if PINNED not in kinds:
        raise ValueError(
            f"{' and '.join(requested)} needs {PINNED} memory, but {device.platform} device "
            f"{device} ({device.device_kind}) has only {', '.join(kinds)}: remove "
            f"{'it' if len(requested) == 1 else 'them'} from the config, or update jax."
        )
