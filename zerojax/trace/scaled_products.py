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

from zerojax.graph.contractions import Contraction
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
      >>> new.eqns[-1].primitive.name, new.eqns[-1].outvars[0].aval.shape
      ('mul', (2, 8))
    """
    return _Products()(closed)


class _Products(Rewriter):
    """Rewrites products."""

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        if (product := Contraction.of(eqn)) is not None:
            for side in (1, 0):
                if (factors := _factors(product, side, graph_of(jaxpr))) is not None:
                    return _scaled_after(product, side, factors)
        return super().equation(eqn, jaxpr)


class _Factors(NamedTuple):
    """An operand of a product as integer codes and their scales, of equal rank."""

    codes: Atom
    scales: Atom


def _factors(product: Contraction, side: int, graph: Graph) -> _Factors | None:
    """Returns the factors of an operand; None if it is not scaled codes, or the scales vary along
    the dimensions that the product sums over."""
    operand = product.eqn.invars[side]
    scaled = graph.producer(graph.origin(operand, {CAST}))
    if scaled is None or scaled.primitive is not prims.mul_p:
        return None
    for codes, scales in (scaled.invars, scaled.invars[::-1]):
        source = graph.origin(codes, {CAST})
        # Integers that are multiplied without a cast are a product of integers, with no scales.
        is_codes = jnp.issubdtype(source.aval.dtype, jnp.integer) and source is not codes
        same_rank = scales.aval.ndim == source.aval.ndim == operand.aval.ndim
        summed = product.contracted[side]
        if is_codes and same_rank and all(scales.aval.shape[d] == 1 for d in summed):
            return _Factors(source, scales)
    return None


def _scaled_after(product: Contraction, side: int, factors: _Factors) -> list[Equation]:
    """Returns a product of codes, and the multiplication of its result by the scales."""
    eqn, places = product.eqn, product.places(side)

    def run(other: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        codes = codes.astype(eqn.invars[side].aval.dtype)
        (result,) = jaxprs.bind(eqn, (other, codes) if side else (codes, other))
        sizes = {at: scales.shape[d] for d, at in places.items()}
        order = (*sorted(places, key=places.__getitem__), *product.contracted[side])
        scales = lax.transpose(scales, order)
        shape = [sizes.get(d, 1) for d in range(result.ndim)]
        scaled: jax.Array = result * lax.reshape(scales, shape).astype(result.dtype)
        return scaled

    return replaced(eqn, run, (eqn.invars[1 - side], factors.codes, factors.scales))
