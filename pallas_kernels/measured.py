"""Devices on which a kernel is faster than XLA on plain JAX, and therefore the default."""

from __future__ import annotations

from collections.abc import Mapping

FASTER: Mapping[str, tuple[str, ...]] = {"layer_norm": ("H200",)}
"""Substrings of device kinds, by kernel, from benchmarks/records/2026-11-27-gpu_day.md. Measured
there too, and as fast as XLA: ``fused_adamw`` and ``softmax_cross_entropy``. The other kernels, and
other GPUs, are not yet measured."""
