"""Rules for equations on a reduction over rows that commute with the reduction."""

from __future__ import annotations

import jax.numpy as jnp

from zerojax.accumulation.kinds import Kinds, RowKind, together
from zerojax.accumulation.reductions import REDUCES
from zerojax.graph.primitives import ADDITIVE, BILINEAR, MOVES, READS, SCATTER_ADDS
from zerojax.xla.types import Equation


def reduced(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of the result if it is a reduction of the same sort, else None.

    Args:
      eqn: The equation.
      kinds: The kinds of its operands, all "fixed" or reductions, at least one a reduction.
    """
    name = eqn.primitive.name
    names = {k.name for k in kinds if k.reduced}
    if len(names) != 1:
        return None
    (kind,) = names
    inherited = together(kinds)
    same = RowKind(kind, **inherited)
    if name in MOVES | READS:
        return same if kinds[0].reduced and not any(k.reduced for k in kinds[1:]) else None
    if name == "convert_element_type":
        return same if _keeps(eqn, kind) else None
    if kind == "prod":
        product = name == "mul" and all(k.reduced for k in kinds)
        return same if product or REDUCES.get(name) == kind else None
    if kind != "sum":
        return same if name == kind or REDUCES.get(name) == kind else None
    summed = [k.name == "sum" for k in kinds]
    sum_or_zero = [k.name == "sum" or k.zero for k in kinds]
    if name in ADDITIVE:
        # A number that each micro-batch adds to its sum would be in the total k times.
        return same if all(sum_or_zero) else None
    if name in BILINEAR:
        # The product of two sums is not the sum of the micro-batches' products.
        return same if sum(summed) == 1 else None
    if name == "div":
        # A division of integers rounds, each micro-batch's sum by itself.
        floats = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
        return same if summed == [True, False] and floats else None
    if name == "select_n":
        return same if not summed[0] and all(sum_or_zero[1:]) else None
    if name == "dynamic_update_slice":
        return same if all(sum_or_zero[:2]) and not any(summed[2:]) else None
    if name in SCATTER_ADDS:
        return same if sum_or_zero[0] and sum_or_zero[2] and not summed[1] else None
    return None


def _keeps(eqn: Equation, kind: str) -> bool:
    """Returns whether a conversion commutes with the reduction."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if kind in ("and", "or"):
        return old == new
    if kind in ("sum", "prod"):
        # A conversion from floats to integers rounds, too.
        are_integers = jnp.issubdtype(old, jnp.integer) and jnp.issubdtype(new, jnp.integer)
        return are_integers or jnp.issubdtype(new, jnp.inexact)
    # Maxima and minima commute with what is monotone, and negative numbers become True.
    return not jnp.issubdtype(new, jnp.bool_)
