"""AdamW in one pass over memory, for NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import elementwise
from pallas_kernels.fused_adamw import reference

_TINY = float(jnp.finfo(jnp.float32).tiny)


def root(x: Any) -> Any:
    """Computes the square root of x >= 0, because jax 0.10 lacks it for Mosaic."""
    result = x * lax.rsqrt(jnp.maximum(x, _TINY))
    return jnp.where(x == jnp.inf, x, result)  # inf * 0 is NaN


@dataclasses.dataclass(frozen=True)
class _Update:
    """:func:`reference.update` for a tile of a leaf, with the new parameters again for a copy."""

    decoupled: bool
    copied: bool

    def __call__(self, scalars: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        updated = reference.update(scalars, arrays, self.decoupled, root)
        return [*updated, updated[0]] if self.copied else updated


def update(
    scalars: jax.Array, leaves: Sequence[Sequence[jax.Array]], decoupled: bool, copy: Any
) -> list[list[jax.Array]]:
    """Computes :func:`reference.update` for each leaf, and the copy in another dtype, if any."""
    dtypes = [x.dtype for x in leaves[0][1:]] + ([] if copy is None else [copy])
    return elementwise.elementwise(
        _Update(bool(decoupled), copy is not None),
        scalars,
        leaves,
        dtypes,
        {0: 1, 1: 2, 2: 3},
        name="fused_adamw",
        run=None if copy is not None else reference.SCALARS.index("run"),
    )
