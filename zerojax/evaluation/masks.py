"""Masks that keep rows that do not count out of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.kinds import RowKind
from zerojax.accumulation.reductions import Reduction


class Mask(NamedTuple):
    """Neutral values for rows that do not count, in the operands of a reduction over rows.

    Attributes:
      primitive: The primitive that reduces.
      kinds: The kinds of the operands.
      how: The reduction.
    """

    primitive: core.Primitive
    kinds: Sequence[RowKind]
    how: Reduction

    def __call__(self, values: Sequence[jax.Array], counts: jax.Array) -> list[jax.Array]:
        """Returns the operands of a part with neutral values in rows that do not count.

        Args:
          values: The operands.
          counts: bool [rows of the part], whether a row counts.
        """
        masked = list(values)
        for i, kind in enumerate(self.kinds):
            if kind.rows and not (i == 1 and self.primitive is prims.scatter_add_p):  # its indices
                masked[i] = self._masked(values[i], kind, counts)
        return masked

    def _masked(self, x: jax.Array, kind: RowKind, counts: jax.Array) -> jax.Array:
        outer = kind.outer or 1
        repeats = x.shape[kind.dim] // (outer * counts.shape[0])
        mask = counts if repeats == 1 else jnp.repeat(counts, repeats)
        mask = mask if outer == 1 else jnp.tile(mask, outer)
        mask = mask.reshape([-1 if d == kind.dim else 1 for d in range(x.ndim)])
        return jnp.where(mask, x, jnp.asarray(self.how.neutral(x.dtype), x.dtype))
