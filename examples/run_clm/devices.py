"""The devices of a run: accelerators where there are some, else virtual CPU devices.

Example::

    mesh = data_mesh(None)        # 8 virtual devices on a laptop, all GPUs on a GPU machine
    device_bytes(mesh)            # 7340032
"""

import math
import os
import pathlib

import jax
from jax.sharding import Mesh, NamedSharding

import zerojax

VIRTUAL_DEVICES = 8
ROWS = ("replica", "data")
"""The axes of a mesh that share the rows of a batch."""


def join() -> None:
    """Joins the processes that were launched together, where this is one of several."""
    if (platforms := _platforms()).startswith("cpu"):
        jax.config.update("jax_platforms", platforms)
    zerojax.init_distributed()


def data_mesh(count: int | None, axes: str | None = None) -> Mesh:
    """`count` devices (None: all, or 8 virtual ones on a CPU) on one "data" axis, or on `axes`, as
    "data=4,model=2".

    Several processes have the devices that each was launched with. In a single one, call it before
    anything else touches JAX's devices. `JAX_PLATFORMS`, where set, decides.
    """
    if (platforms := _platforms()).startswith("cpu") and not jax.distributed.is_initialized():
        jax.config.update("jax_platforms", platforms)
        jax.config.update("jax_num_cpu_devices", count or VIRTUAL_DEVICES)
    mesh = zerojax.mesh(count, axes)
    if more := {*mesh.axis_names} - {*ROWS, "model"}:
        raise ValueError(
            f"--mesh {axes}: this job knows no axis {min(more)!r}; there are {', '.join(ROWS)} and "
            "model"
        )
    return mesh


def row_devices(mesh: Mesh) -> int:
    """Devices that share the rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ROWS)


def _platforms() -> str:
    """JAX's platforms; "" for its own choice."""
    # A CUDA plugin may be installed for its compiler alone; it fails to start without a GPU.
    return os.environ.get("JAX_PLATFORMS") or ("" if accelerator_present() else "cpu")


def accelerator_present() -> bool:
    """Whether the machine shows an NVIDIA GPU or a TPU, asked of the system and not of JAX."""
    signs = ("dev/nvidia[0-9]*", "dev/dxg", "dev/accel[0-9]*", "dev/vfio/[0-9]*")
    return any(next(pathlib.Path("/").glob(sign), None) for sign in signs)


def device_bytes(mesh: Mesh) -> int:
    """Bytes on the fullest device: its own peak where it keeps one, else the placed arrays that are
    alive now, of which a caller takes the largest."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if all("peak_bytes_in_use" in s for s in stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    return sum(map(_bytes_on_each, jax.live_arrays()))


def _bytes_on_each(array: jax.Array) -> int:
    """Bytes of one device's part; 0 for host memory and for views of single shards."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind != "device":
        return 0
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
