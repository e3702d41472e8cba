"""A process's share of its host's GPUs, determined before JAX is used."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping

import jax

from zerojax.distributed.roll_call import Record, format_indices


def on_cpu() -> bool:
    """Returns whether JAX will start only CPUs, without starting its backends."""
    platforms = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    has_plugin = importlib.util.find_spec("jax_plugins") and any(
        map(importlib.util.find_spec, plugins)
    )
    return platforms.split(",")[0] == "cpu" or not has_plugin


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Returns the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves visible, in its order; None if
    nvidia-smi does not answer."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        completed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    uuids = completed.stdout.split()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return uuids
    selected: list[str] = []
    for name in map(str.strip, visible.split(",")):
        matches = [
            uuid
            for n, uuid in enumerate(uuids)
            if name == str(n) or (name and uuid.startswith(name))
        ]
        if not matches and not name.startswith("MIG-"):
            break  # like CUDA, hide all that follow an unknown GPU
        selected.append(matches[0] if matches else name)
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
            f"{format_indices(hidden, 'process')} has no GPU: unset CUDA_VISIBLE_DEVICES"
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
