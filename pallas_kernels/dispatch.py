"""Choice of a kernel's implementation."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from pallas_kernels import compat
from pallas_kernels.measured import FASTER

Implementation = Literal["mosaic_gpu", "xla"]


class Target(NamedTuple):
    """Devices that a traced function targets: ``"cpu"``, ``"gpu"`` or ``"tpu"``, and their kind."""

    platform: str
    kind: str


def target() -> Target:
    """Returns the mesh's devices within ``shard_map``, even if absent, else the default device."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        return Target(device.platform, device.device_kind)
    default = compat.default_device()
    return Target(
        "gpu" if default.platform in ("cuda", "gpu") else default.platform, default.device_kind
    )


def available(at: Target) -> tuple[Implementation, ...]:
    """Returns the usable implementations; Mosaic GPU needs Hopper or newer, or the simulator."""
    is_supported = at.platform == "gpu" and any(
        name in at.kind for name in ("H100", "H200", "GH200", "B200")
    )
    return ("xla", "mosaic_gpu") if is_supported or compat.simulated() else ("xla",)


def choose(kernel: str, asked: str | None) -> Implementation:
    """Chooses the implementation to run.

    Args:
      kernel: the name of the kernel.
      asked: the requested implementation; None for the one that was measured to be fastest on this
        kind of device (:mod:`pallas_kernels.measured`).

    Raises:
      ValueError: the implementation is unknown, or does not work on this device.

    Example:
      >>> choose("rms_norm", None)
      'xla'
      >>> choose("rms_norm", "cuda")
      Traceback (most recent call last):
        ...
      ValueError: rms_norm: unknown implementation 'cuda'; there are None, 'mosaic_gpu' and 'xla'.
    """
    device = target()
    usable = available(device)
    if asked is None:
        is_faster = any(name in device.kind for name in FASTER.get(kernel, ()))
        return "mosaic_gpu" if is_faster and "mosaic_gpu" in usable else "xla"
    if asked == "xla" or asked == "mosaic_gpu":
        if asked in usable:
            return asked
        raise ValueError(
            f"{kernel}: implementation {asked!r} needs an H100, H200 or B200, and this runs on "
            f"{device.platform} ({device.kind}), where there are: {', '.join(usable)}. Leave it "
            "None."
        )
    raise ValueError(
        f"{kernel}: unknown implementation {asked!r}; there are None, 'mosaic_gpu' and 'xla'."
    )
