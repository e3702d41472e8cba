"""Products of two arrays as einsums: which dimensions of the operands and of the result are one.

    x[b, i, k] * w[b, k, j] = y[b, i, j]

Here ``b`` is a batch dimension, ``k`` is contracted, and ``i`` and ``j`` are free. The result has
the batch dimensions first, then the free ones of the left operand, then those of the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zerojax.graph.primitives import CONTRACTIONS
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation, MaybeNone

Pairs: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Dimensions of the left operand, and for each the same dimension of the right one."""

RESULT = 2
"""The position of a product's result, after those of its operands."""


@dataclass(frozen=True, eq=False)
class Contraction:
    """A product of two arrays.

    Attributes:
      eqn: The equation, a ``dot_general``.
      contracted: The dimensions over which the product sums.
      batched: The batch dimensions.
      names: For the left operand, the right one and the result, a number for each dimension;
        dimensions with equal numbers are the same one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> closed = jax.make_jaxpr(jnp.matmul)(jnp.ones((5, 2, 3)), jnp.ones((5, 3, 4)))
      >>> product = Contraction.of(closed.eqns[0])
      >>> product.contracted, product.batched
      (((2,), (1,)), ((0,), (0,)))
      >>> product.names
      ((0, 1, 2), (0, 2, 5), (0, 1, 5))
      >>> product.free(1), product.places(1)
      ([2], {0: 0, 2: 2})
    """

    eqn: Equation
    contracted: Pairs
    batched: Pairs
    names: tuple[Sequence[int], Sequence[int], Sequence[int]]

    @classmethod
    def of(cls, eqn: Equation) -> Contraction | MaybeNone:
        """Returns an equation as a product; None for other primitives."""
        if eqn.primitive.name not in CONTRACTIONS:
            return None
        contracted, batched = param(eqn, "dimension_numbers")
        n, m = (v.aval.ndim for v in eqn.invars)
        shared = dict(
            zip((*contracted[1], *batched[1]), (*contracted[0], *batched[0]), strict=True)
        )
        left, right = tuple(range(n)), tuple(shared.get(d, n + d) for d in range(m))
        free = [x for x in (*left, *right) if (x in left) != (x in right)]
        return cls(eqn, contracted, batched, (left, right, (*batched[0], *free)))

    def free(self, operand: int) -> list[int]:
        """Returns the dimensions that the other operand lacks."""
        other = self.names[1 - operand]
        return [d for d, name in enumerate(self.names[operand]) if name not in other]

    def places(self, operand: int) -> Mapping[int, int]:
        """Returns the dimension of the result for each dimension of an operand that it has: all but
        the contracted ones."""
        result = self.names[RESULT]
        return {d: result.index(x) for d, x in enumerate(self.names[operand]) if x in result}

    def params(self, contracted: Pairs, batched: Pairs) -> dict[str, object]:
        """Returns the parameters of a product along other dimensions, for ``jaxprs.bind``."""
        dimensions = tuple(map(tuple, contracted)), tuple(map(tuple, batched))
        # A requested sharding is one of the former result's dimensions.
        return self.eqn.params | {"dimension_numbers": dimensions, "out_sharding": None}
