"""Rules for how products, convolutions, lookups and scatters carry the rows of a batch.

They are part of the table in :mod:`zerojax.accumulation.row_rules`, which describes rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerojax.accumulation.kinds import Kinds, RowKind, shared_layout, together
from zerojax.accumulation.symbolic import growing
from zerojax.graph.contractions import Contraction
from zerojax.graph.lookups import Lookup
from zerojax.graph.primitives import SCATTER_ADDS
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation


def moved(eqn: Equation, kind: RowKind) -> RowKind | None:
    """Returns a kind in the dimension of the results that grows; None if not one does."""
    dims = {d for v in eqn.outvars for d in growing(v)}
    return kind.but(dim=dims.pop()) if len(dims) == 1 else None


def apart(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the layout of rows in the results of an equation that computes each row from the same
    row of its operands; None if the layouts of these differ."""
    layout = shared_layout([k.but(dim=0) if k.rows else k for k in kinds])
    return layout and moved(eqn, layout)


def product(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a matrix product: rows, or a sum if rows are contracted."""
    product = Contraction.of(eqn)
    if any(k.rows and k.index for k in kinds):
        return None
    if not any(k.rows and k.dim in product.contracted[i] for i, k in enumerate(kinds)):
        # Rows of one operand alone, or of both along a batch dimension.
        free = any(k.rows and k.dim in product.free(i) for i, k in enumerate(kinds))
        return None if free and all(k.rows for k in kinds) else apart(eqn, kinds)
    if any(map(growing, eqn.outvars)) or shared_layout([k.but(dim=0) for k in kinds]) is None:
        return None
    return RowKind("sum", learned=any(k.learned for k in kinds))


def convolution(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a convolution: rows, or a sum for the gradient of its kernel."""
    left, right = kinds
    lhs, rhs, _ = param(eqn, "dimension_numbers")
    batch_groups, groups = (param(eqn, f"{x}_group_count") for x in ("batch", "feature"))
    if not left.rows or batch_groups != 1:
        return None
    if not right.rows:
        return moved(eqn, left.but(zero=False)) if left.dim == lhs[0] else None
    same = apart(eqn, kinds) or shared_layout([k.but(dim=0) for k in kinds])
    # For the gradient of a kernel JAX exchanges batch and features, so that rows are contracted.
    if left.dim != lhs[1] or same is None or same.index:
        return None
    if right.dim == rhs[1] and groups == 1:
        return RowKind("sum", learned=left.learned or right.learned)
    # Each feature is its own group, so the gradients are per row.
    is_depthwise = right.dim == rhs[0] and eqn.invars[1].aval.shape[rhs[1]] == 1
    return same if is_depthwise else None


def lookup(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a lookup (``gather``) in a table, or in rows by their own index."""
    operand, indices = kinds
    windows, d = Lookup.of(eqn), operand.dim
    inherited: dict[str, Any] = together(kinds) | {"zero": False}
    numbered = {"index": "number"} if operand.index or indices.index else {}
    if not operand.rows:
        layout = moved(eqn, indices)
    elif d in windows.batched:
        layout = apart(eqn, kinds) if indices.rows else None
    elif d in windows.complete:
        layout = None if indices.rows else moved(eqn, operand)
    else:
        layout = moved(eqn, operand) if _own_index(eqn, indices, windows.columns, d) else None
        numbered = {}
    return layout and layout.but(**inherited, **numbered)


def _own_index(eqn: Equation, indices: RowKind, columns: Sequence[int], d: int) -> bool:
    """Returns whether the column of ``indices`` for a dimension holds the own index of each row
    along this dimension."""
    if not indices.rows or indices.index != "own" or d not in columns:
        return False
    array, numbers = (v.aval.shape for v in eqn.invars[:2])
    return indices.column == columns.index(d) and array[d] == numbers[indices.dim]


def scatter(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a scatter: a sum if rows are added to zeros or to a sum, else rows."""
    operand, indices, updates = kinds
    windows, inherited = Lookup.of(eqn), together(kinds)
    if not operand.rows:
        adds = eqn.primitive.name in SCATTER_ADDS
        summed = operand.name == "sum" or (operand.name == "fixed" and operand.zero)
        if not adds or not summed or updates.index or indices.index:
            return None
        return RowKind("sum", **inherited)
    d = operand.dim
    outers = {k.outer for k in kinds if k.rows} - {None}
    if len(outers) > 1:
        return None
    numbered = "number" if operand.index or updates.index else ""
    layout = operand.but(outer=next(iter(outers), None), zero=False, index=numbered, **inherited)
    if d in windows.batched:
        layout = layout.but(index="number") if indices.index else layout
        return layout if indices.rows else None
    if d in windows.picked:
        return layout if _own_index(eqn, indices, windows.columns, d) else None
    in_same_row = not updates.rows or updates.dim == windows.window[d]
    return layout if d in windows.complete and in_same_row and not indices.rows else None
