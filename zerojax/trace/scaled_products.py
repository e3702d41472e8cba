"""Products of scaled integers, scaled after the product.

A quantized matrix is ``codes * scales``, with a scale for each output channel. Computed before the
product, it is written to memory and read again: five bytes for each int8 code. A scale that does
not vary along the dimensions over which a product sums may multiply the result instead:

    x @ (codes * scales) = (x @ codes) * scales

XLA then converts codes within the product, and reads one byte for each int8 code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import CAST
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Rewriter, replaced
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr


def with_scaled_products(closed: AnyJaxpr) -> AnyJaxpr:
    """Returns a traced program that multiplies the results of products by the scales of quantized
    operands, where these do not vary along the dimensions that a product sums over. Only the
    rounding of results may differ.

    Calls, loops and branches are entered. A program without such products is returned unchanged.

    Args:
      closed: The program's jaxpr and its constants.

    Example:
      >>> def product(x, codes, scales):
      ...     return x @ (codes.astype(jnp.float32) * scales)
      >>> shapes = jnp.ones((2, 4)), jnp.ones((4, 8), jnp.int8), jnp.ones((1, 8))
      >>> new = with_scaled_products(jax.make_jaxpr(product)(*shapes))
      >>> names = [e.primitive.name for e in new.eqns]
      >>> names.index("dot_general") < len(names) - 1, names[-1]
      (True, 'mul')
    """
    return _Products()(closed)


class _Products(Rewriter):
    """Rewrites products."""

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        if eqn.primitive is prims.dot_general_p:
            for side in (1, 0):
                if (factors := _factors(eqn, side, graph_of(jaxpr))) is not None:
                    return _scaled_after(eqn, side, factors)
        return super().equation(eqn, jaxpr)


class _Factors(NamedTuple):
    """An operand of a product as integer codes and their scales, of equal rank."""

    codes: Atom
    scales: Atom


def _factors(eqn: Equation, side: int, graph: Graph) -> _Factors | None:
    """Returns the factors of an operand; None if it is not scaled codes, or the scales vary along
    the dimensions that the product sums over."""
    product = graph.producer(graph.origin(eqn.invars[side], {CAST}))
    if product is None or product.primitive is not prims.mul_p:
        return None
    summed = jaxprs.param(eqn, "dimension_numbers")[0][side]
    for codes, scales in (product.invars, product.invars[::-1]):
        source = graph.origin(codes, {CAST})
        is_codes = jnp.issubdtype(source.aval.dtype, jnp.integer) and source is not codes
        same_rank = scales.aval.ndim == source.aval.ndim == eqn.invars[side].aval.ndim
        if is_codes and same_rank and all(scales.aval.shape[d] == 1 for d in summed):
            return _Factors(source, scales)
    return None


def _scaled_after(eqn: Equation, side: int, factors: _Factors) -> list[Equation]:
    """Returns a product of codes, and the multiplication of its result by the scales."""
    params = eqn.params
    contracting, batch = params["dimension_numbers"]
    ndim = eqn.invars[side].aval.ndim
    taken = (*batch[side], *contracting[side])
    free = [d for d in range(ndim) if d not in taken]
    others = eqn.invars[1 - side].aval.ndim - len(batch[0]) - len(contracting[0])

    def run(other: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        codes = codes.astype(eqn.invars[side].aval.dtype)
        operands = (other, codes) if side else (codes, other)
        result: jax.Array = prims.dot_general_p.bind(*operands, **params)
        # In the result, batch dimensions come first, then those of the left operand.
        scales = lax.transpose(scales, (*batch[side], *free, *contracting[side]))
        shape = scales.shape[: len(batch[side])]
        own = scales.shape[len(shape) : len(shape) + len(free)]
        shape += ((1,) * others + own) if side else (own + (1,) * others)
        return result * lax.reshape(scales, shape).astype(result.dtype)

    return replaced(eqn, run, (eqn.invars[1 - side], factors.codes, factors.scales))
