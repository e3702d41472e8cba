"""Devices on which a kernel is faster than XLA on plain JAX, and therefore the default."""

from __future__ import annotations

from collections.abc import Mapping

FASTER: Mapping[str, tuple[str, ...]] = {}
"""Substrings of device kinds, by kernel. Empty: not yet measured on a GPU (benchmarks/records)."""
