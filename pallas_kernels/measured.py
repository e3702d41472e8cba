"""Devices on which a kernel is faster than XLA on plain JAX, and therefore the default."""

from __future__ import annotations

from collections.abc import Mapping

FASTER: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("H200",),
    "quantize_blockwise": ("H200",),
}
"""Substrings of device kinds, by kernel, from benchmarks/records/2026-11-27-gpu_day.md. Measured
there too, and not faster than XLA on every call: the other kernels. Other GPUs are not yet
measured."""
