"""Options for XLA, set for each compile because an unknown one ends the process."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from zerojax.xla import compat

# Whole gradients that may wait, in bytes, to be reduced together. XLA's own choice lets
# hundreds of megabytes wait, which is what stages 2 and 3 are there to avoid.
BUCKET = 32 * 2**20


# Copies between device and host memory under way at a time. XLA's own choice, one, would end each
# before the next begins, and before the computation that is to hide it.
COPIES = 64

GPUS = ("gpu", "cuda")
"""The platforms of GPUs, as devices name them."""

# Bytes of a result, gathered or reduced, up to which XLA combines collectives by itself.
COMBINED = 30 * 2**20

# Collectives under way at a time, where XLA's scheduler takes all to last equally long.
TOGETHER = 4

Options = dict[str, int | bool | str]
"""Values by XLA's names."""


def options(
    mesh: Mesh,
    chosen: Options | None = None,
    *,
    shards: int | None = None,
    layer: int = 0,
    overlap: bool = False,
) -> Options | None:
    """Compiler options for the mesh's platform, None where there are none to set.

    Args:
      mesh: The devices.
      chosen: Options for GPUs that go before ours.
      shards: Of a gradient; by default one for each device.
      layer: Bytes that a loop gathers ahead or reduces behind; 0 where nothing is.
      overlap: Whether collectives are to run beside computation.
    """
    device = mesh.devices.flat[0]
    platform = device.platform
    if platform == "cpu":
        # One collective at a time: where a device waits in two, another may find no thread, and
        # XLA ends the process after 40 seconds.
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    if platform not in GPUS:
        return None
    # XLA counts the result of a reduce-scatter, which is one device's piece. Each collective over
    # many devices has a price, whatever it moves: a layer's gradients go together.
    waiting = max(BUCKET, layer) // (shards or mesh.devices.size)
    ours: Options = {"xla_gpu_reduce_scatter_combine_threshold_bytes": waiting}
    if mesh.devices.size >= compat.ALL_REDUCE_KERNELS_FAIL:
        ours["xla_gpu_experimental_use_collective_kernels"] = ""  # NCCL's run instead
    if overlap:
        # Otherwise XLA waits for each collective where it starts, before Hopper.
        ours["xla_gpu_enable_latency_hiding_scheduler"] = True
    if overlap and (layer or _before_hopper(device)):
        # Otherwise a collective starts where the one before has ended, and is waited for.
        ours["xla_gpu_experimental_parallel_collective_overlap_limit"] = TOGETHER
    if layer:
        # Otherwise each iteration copies the layer that it has made over the one that it was given.
        ours["xla_gpu_enable_while_loop_unrolling"] = "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
    if layer > COMBINED:
        # A device runs one collective after the other: of two that gather ahead one is waited for.
        ours["xla_gpu_all_gather_combine_threshold_bytes"] = layer
    return {**ours, **(chosen or {})}


def _before_hopper(device: jax.Device) -> bool:
    """Whether a GPU is of NVIDIA's compute capability 7 or 8, for which XLA schedules otherwise."""
    return str(getattr(device, "compute_capability", None)).startswith(("7.", "8."))


def streaming(mesh: Mesh, chosen: Options | None = None) -> Options | None:
    """The same for a program that copies between device and host memory as it computes."""
    base = options(mesh)
    if base is None or mesh.devices.flat[0].platform == "cpu":
        return base
    ours = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_async_compute_limit": COPIES,
    }
    return {**base, **ours, **(chosen or {})}
