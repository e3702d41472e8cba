"""Rules for how products, convolutions, lookups and scatters carry the rows of a batch.

They are part of the table in :mod:`zerojax.accumulation.row_rules`, which describes rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerojax.accumulation.kinds import Kinds, RowKind, shared_layout, together
from zerojax.graph.primitives import SCATTER_ADDS
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation


def product(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a matrix product: rows, or a sum if rows are contracted."""
    (contracted, batched) = param(eqn, "dimension_numbers")
    inherited = together(kinds)
    places: list[int] = []
    summed = False
    for side, (v, kind) in enumerate(zip(eqn.invars, kinds, strict=True)):
        if not kind.rows:
            continue
        other = kinds[1 - side]
        for dims, adds in ((contracted, True), (batched, False)):
            if kind.dim in dims[side]:
                position = list(dims[side]).index(kind.dim)
                if (
                    not other.rows
                    or other.dim != dims[1 - side][position]
                    or shared_layout([kind.but(dim=0), other.but(dim=0)]) is None
                ):
                    return None
                summed |= adds
                if not adds:
                    places.append(position)
                break
        else:
            taken = {*contracted[side], *batched[side]}
            free = [d for d in range(v.aval.ndim) if d not in taken]
            position = len(batched[0]) + free.index(kind.dim)
            if side:
                left = eqn.invars[0].aval.ndim
                position += left - len(contracted[0]) - len(batched[0])
            places.append(position)
    if any(k.rows and k.index for k in kinds):
        return None
    if summed:
        return RowKind("sum", learned=inherited["learned"]) if not places else None
    if len(set(places)) != 1:
        return None
    outers = {k.outer for k in kinds if k.rows} - {None}
    return RowKind("rows", dim=places[0], outer=next(iter(outers), None), **inherited)


def convolution(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a convolution: rows, or a sum for the gradient of its kernel."""
    left, right = kinds
    lhs, rhs, out = param(eqn, "dimension_numbers")
    if left.rows and not right.rows:
        plain = left.dim == lhs[0] and param(eqn, "batch_group_count") == 1
        return left.but(dim=out[0], zero=False) if plain else None
    if not left.rows or not right.rows or left.dim != lhs[1]:
        return None
    same = shared_layout([left.but(dim=0), right.but(dim=0)])
    if same is None or same.index:
        return None
    if right.dim == rhs[1] and param(eqn, "feature_group_count") == 1:
        return RowKind("sum", learned=left.learned or right.learned)
    # Each feature is its own group, so the gradients are per row.
    is_depthwise = right.dim == rhs[0] and eqn.invars[1].aval.shape[rhs[1]] == 1
    return same.but(dim=out[1]) if is_depthwise and param(eqn, "batch_group_count") == 1 else None


def lookup(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a lookup (``gather``) in a table, or in rows by their own index."""
    operand, indices = kinds
    dn, sizes = param(eqn, "dimension_numbers"), param(eqn, "slice_sizes")
    ndim = eqn.outvars[0].aval.ndim
    batch = [d for d in range(ndim) if d not in dn.offset_dims]
    inherited: dict[str, Any] = together(kinds) | {"zero": False}
    numbered = {"index": "number"} if operand.index or indices.index else {}
    if not operand.rows:
        if indices.dim >= len(batch):
            return None
        return indices.but(dim=batch[indices.dim], **inherited, **numbered)
    shape, d = eqn.invars[0].aval.shape, operand.dim
    if d in dn.operand_batching_dims:
        position = dn.start_indices_batching_dims[dn.operand_batching_dims.index(d)]
        layout = shared_layout([operand.but(dim=0), indices.but(dim=0)])
        if not indices.rows or indices.dim != position or layout is None:
            return None
        return layout.but(dim=batch[position], **inherited, **numbered)
    if sizes[d] == shape[d] and d not in dn.collapsed_slice_dims:
        if indices.rows:
            return None
        window = _window(len(shape), dn.collapsed_slice_dims, dn.operand_batching_dims)
        return operand.but(dim=dn.offset_dims[window.index(d)], **inherited, **numbered)
    own = d in dn.start_index_map and _holds_own_index(indices, dn.start_index_map.index(d))
    if own and shape[d] == eqn.invars[1].aval.shape[indices.dim]:
        return operand.but(dim=batch[indices.dim], **inherited)
    return None


def _window(ndim: int, left_out: Sequence[int], batching: Sequence[int]) -> list[int]:
    """Returns the dimensions of the operand that each slice keeps."""
    return [d for d in range(ndim) if d not in left_out and d not in batching]


def _holds_own_index(indices: RowKind, column: int) -> bool:
    """Returns whether a column of ``indices`` holds each row's own index."""
    return indices.rows and indices.index == "own" and indices.column == column


def scatter(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Returns the kind of a scatter: a sum if rows are added to zeros or to a sum, else rows."""
    operand, indices, updates = kinds
    dn = param(eqn, "dimension_numbers")
    inherited = together(kinds)
    if not operand.rows:
        adds = eqn.primitive.name in SCATTER_ADDS
        summed = operand.name == "sum" or (operand.name == "fixed" and operand.zero)
        if not adds or not summed or updates.index or indices.index:
            return None
        return RowKind("sum", **inherited)
    d, shape = operand.dim, eqn.invars[0].aval.shape
    outers = {k.outer for k in kinds if k.rows} - {None}
    if len(outers) > 1:
        return None
    numbered = "number" if operand.index or updates.index else ""
    layout = operand.but(outer=next(iter(outers), None), zero=False, index=numbered, **inherited)
    if d in dn.operand_batching_dims:
        position = dn.scatter_indices_batching_dims[dn.operand_batching_dims.index(d)]
        layout = layout.but(index="number") if indices.index else layout
        return layout if indices.rows and indices.dim == position else None
    if d in dn.inserted_window_dims:
        own = d in dn.scatter_dims_to_operand_dims and _holds_own_index(
            indices, dn.scatter_dims_to_operand_dims.index(d)
        )
        covers_all_rows = own and shape[d] == eqn.invars[1].aval.shape[indices.dim]
        return layout if covers_all_rows else None
    ndim = eqn.invars[0].aval.ndim
    window = _window(ndim, dn.inserted_window_dims, dn.operand_batching_dims)
    position = dn.update_window_dims[window.index(d)]
    is_full_window = eqn.invars[2].aval.shape[position] == eqn.invars[0].aval.shape[d]
    rows_aligned = not indices.rows and (not updates.rows or updates.dim == position)
    return layout if is_full_window and rows_aligned else None
