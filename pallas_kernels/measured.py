"""Where a kernel beat what XLA makes of plain JAX: only there it is the default."""

from __future__ import annotations

from collections.abc import Mapping

FASTER: Mapping[str, tuple[str, ...]] = {}
"""Kernel to parts of device kinds. Empty: no GPU was at hand yet (benchmarks/records)."""
