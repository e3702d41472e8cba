"""The GPUs of a host and a process's share of them, found without JAX."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.distributed.roll_call import Record, format_indices

_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
      name: Name in ``CUDA_VISIBLE_DEVICES``: a number, or an identifier.
      uuid: Identifier; "" if unknown.
      bus: Address on the PCI bus as sysfs writes it; "" if unknown.
    """

    name: str
    uuid: str
    bus: str


def installed_gpus() -> list[Gpu] | None:
    """Returns all GPUs, in the order of the bus; None if nvidia-smi does not answer."""
    try:
        completed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split(", ") for line in completed.stdout.splitlines()]
    return [Gpu(row[0], row[1], row[2].lower()[-12:]) for row in rows if len(row) == 3]


def visible_gpus(environ: Mapping[str, str], installed: list[Gpu]) -> list[Gpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order."""
    if (text := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return installed
    has_uuids = any(gpu.uuid for gpu in installed)
    selected = []
    for name in map(str.strip, text.split(",")):
        matches = (gpu for gpu in installed if name and gpu.uuid.startswith(name))
        found = next((gpu for gpu in installed if gpu.name == name), None) or next(matches, None)
        is_elsewhere = name.startswith("MIG-") or (name.startswith("GPU-") and not has_uuids)
        if found is None and not is_elsewhere:
            break  # like CUDA, hide all that follow an unknown GPU
        selected.append(found._replace(name=name) if found else Gpu(name, name, ""))
    return selected


def local_devices(here: list[Record]) -> list[list[int] | None]:
    """Returns for each process of a host the positions of its GPUs among the visible GPUs; None for
    all of them.

    Processes that see the same GPUs divide them evenly, in order.

    Args:
      here: The records of the host's processes, in their order.

    Raises:
      ValueError: The GPUs are too few, cannot be divided evenly or overlap, or a process sees none.

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
            f"{format_indices(hidden, 'process')} has no GPU, and others have some: unset "
            "CUDA_VISIBLE_DEVICES, or name a GPU of each process"
        )
    if len({*map(tuple, sets)}) == 1 and len(here) > 1:
        gpus = len(sets[0])
        if gpus % len(here):
            raise ValueError(
                f"{len(here)} processes cannot share {gpus} GPU{'s' * (gpus > 1)} evenly: start "
                "one process a GPU, or let CUDA_VISIBLE_DEVICES show all GPUs"
            )
        each = gpus // len(here)
        return [[*range(n * each, (n + 1) * each)] for n in range(len(here))]
    uses = [uuid for seen in sets for uuid in seen]
    if len(uses) > len({*uses}):
        raise ValueError(
            "processes see some GPUs in common and not others: set CUDA_VISIBLE_DEVICES to the "
            "GPUs of each process alone, or unset it for all"
        )
    return [None] * len(here)
