"""How equations carry the rows of a batch from their operands to their result.

Each rule is given the equation on the whole batch and the kinds of its operands, at least one of
them "rows", the others "rows", "fixed" or "own". It returns the layout of rows in the result (or
that of each result), a "sum" where the equation adds rows up, or None where it mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from zerojax.accumulation.kinds import REDUCTIONS, Kind, agreed, together
from zerojax.trace.elementwise import ELEMENTWISE
from zerojax.xla.jaxprs import param

Rule = Callable[[Any, list[Kind]], "Kind | None"]

# Beside those that the collectives know to work on shards.
_ELEMENTWISE = ELEMENTWISE | {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "clz", "complex", "conj", "device_put", "digamma", "eq_to", "erf_inv",
    "erfc", "from_edtype", "igamma", "igamma_grad_a", "igammac", "imag", "layout_constraint",
    "le_to", "lgamma", "log2", "lt_to", "mulhi", "nextafter", "one_minus_square", "philox2x32",
    "philox4x32", "polygamma", "population_count", "pvary", "random_bits", "random_clone",
    "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap",
    "random_wrap", "real", "regularized_incomplete_beta", "reshard", "sharding_constraint",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sinh", "stage", "tan",
    "threefry2x32", "threefry4x32", "tie", "to_edtype", "with_memory_space_constraint",
    "xla_metadata_value", "zeta",
}  # fmt: skip

_LEADING = frozenset({
    "cholesky", "eig", "eigh", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip
"""Work on the last two dimensions, for each entry of those before."""


def _elementwise(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found = agreed(kinds)
    if found is None:
        return None
    ranks = {v.aval.ndim for v, k in zip(eqn.invars, kinds, strict=True) if k.rows}
    if len(ranks) != 1:
        return None
    return found.but(index=_index_of(eqn, kinds)) if found.index else found


def _index_of(eqn: Any, kinds: list[Kind]) -> str:
    """Whether the numbers of rows are still those; numpy's indexing looks for negative ones."""
    name = eqn.primitive.name
    if name in ("convert_element_type", "copy", "copy_p", "name", "sharding_constraint"):
        return kinds[0].index
    if name == "lt" and kinds[0].index == "own" and kinds[1].zero:
        return "negative"
    if name == "select_n" and (kinds[0].index, kinds[1].index) == ("negative", "own"):
        return "own"
    return "number"


def _reduce(eqn: Any, kinds: list[Kind]) -> Kind | None:
    axes = param(eqn, "axes")
    (kind,) = kinds
    if kind.dim not in axes:
        return kind.but(dim=kind.dim - sum(a < kind.dim for a in axes), zero=False)
    if kind.index or eqn.primitive.name not in REDUCTIONS:
        return None
    return Kind(REDUCTIONS[eqn.primitive.name], learned=kind.learned)


def _broadcast(eqn: Any, kinds: list[Kind]) -> Kind | None:
    kind = kinds[0]
    return kind.but(dim=param(eqn, "broadcast_dimensions")[kind.dim])


def _transpose(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    return kind.but(dim=list(param(eqn, "permutation")).index(kind.dim))


def _reshape(eqn: Any, kinds: list[Kind]) -> Kind | None:
    kind = kinds[0]
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    outside = math.prod(old[: kind.dim]) * (kind.outer or 1)
    for j, size in enumerate(new):
        before = math.prod(new[:j])
        if outside % before == 0 and before * size > outside and size > 1:
            outer = outside // before
            if size % outer:
                return None
            return kind.but(dim=j, outer=None if kind.outer is None else outer)
    return None


def _squeeze(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    gone = param(eqn, "dimensions")
    return None if kind.dim in gone else kind.but(dim=kind.dim - sum(d < kind.dim for d in gone))


def _slice(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    n = eqn.invars[0].aval.shape[kind.dim]
    strides = param(eqn, "strides")
    return _stretch(
        kind,
        n,
        param(eqn, "start_indices")[kind.dim],
        param(eqn, "limit_indices")[kind.dim],
        1 if strides is None else strides[kind.dim],
    )


def _stretch(kind: Kind, n: int, start: int, limit: int, stride: int = 1) -> Kind | None:
    """Part of the dimension of rows: all of it, or whole stretches."""
    if (start, limit, stride) == (0, n, 1):
        return kind
    if kind.outer is None:
        return kind if stride == 1 else None
    size = n // kind.outer
    if stride != 1 or start % size or limit % size or start == limit:
        return None
    return kind.but(outer=(limit - start) // size)


def _split(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    sizes = param(eqn, "sizes")
    if param(eqn, "axis") != kind.dim:
        return kind
    if len(set(sizes)) != 1 or (kind.outer or len(sizes)) % len(sizes):
        return None
    return kind.but(outer=None if kind.outer is None else kind.outer // len(sizes))


def _concatenate(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found = agreed(kinds)
    along = param(eqn, "dimension")
    if found is None or along != found.dim:
        return found if found is None else _beside(eqn, kinds, found, along)
    sizes = {v.aval.shape[along] for v in eqn.invars}
    if not all(k.rows for k in kinds) or found.outer not in (1, None) or len(sizes) != 1:
        return None
    return found if found.outer is None else found.but(outer=len(kinds))


def _beside(eqn: Any, kinds: list[Kind], found: Kind, along: int) -> Kind:
    """The numbers of rows as one column of indices."""
    at = [i for i, k in enumerate(kinds) if k.index]
    last = along == eqn.outvars[0].aval.ndim - 1
    if last and len(at) == 1 and kinds[at[0]].index == "own":
        before = eqn.invars[: at[0]]
        column = sum(v.aval.shape[along] if v.aval.ndim > along else 1 for v in before)
        return found.but(index="own", column=column)
    return found


def _stack(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found, along = agreed(kinds), param(eqn, "axis") % eqn.outvars[0].aval.ndim
    if found is None:
        return None
    found = found.but(dim=found.dim + (along <= found.dim))
    return _beside(eqn, kinds, found, along)


def _unstack(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    along = param(eqn, "axis") % eqn.invars[0].aval.ndim
    return None if along == kind.dim else kind.but(dim=kind.dim - (along < kind.dim))


def _pad(eqn: Any, kinds: list[Kind]) -> Kind | None:
    kind, value = kinds
    if not kind.rows:
        return None
    low, high, inside = param(eqn, "padding_config")[kind.dim]
    if (low, high, inside) == (0, 0, 0):
        return kind.but(zero=False)
    n = eqn.invars[0].aval.shape[kind.dim]
    size = n // (kind.outer or 1)
    if inside or low < 0 or high < 0 or low % size or high % size or not value.zero:
        return None
    return kind.but(outer=(low + n + high) // size)


def _along(parameter: str) -> Rule:
    """For what works along one dimension (or several), on each entry of the others."""

    def rule(eqn: Any, kinds: list[Kind]) -> Kind | None:
        found, along = agreed(kinds), param(eqn, parameter)
        along = along if isinstance(along, tuple | list) else (along,)
        n = eqn.invars[0].aval.ndim
        if found is None or found.dim in [a % n for a in along]:
            return None
        return found

    return rule


def _last(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found = agreed(kinds)
    along = param(eqn, "axis") % eqn.invars[0].aval.ndim
    return None if found is None or found.dim == along else found


def _argument(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    axes = param(eqn, "axes")
    if kind.dim in axes:
        return None
    return kind.but(dim=kind.dim - sum(a < kind.dim for a in axes), zero=False)


def _tile(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    return kind if param(eqn, "reps")[kind.dim] == 1 else None


def _window(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found = agreed(kinds)
    if found is None or param(eqn, "window_dimensions")[found.dim] != 1:
        return None
    strides = param(eqn, "window_strides", None)
    return found if strides is None or strides[found.dim] == 1 else None


def _leading(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found = agreed(kinds)
    core = min(2, eqn.invars[0].aval.ndim)
    return found if found is not None and found.dim < eqn.invars[0].aval.ndim - core else None


def _fft(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (kind,) = kinds
    last = eqn.invars[0].aval.ndim - len(param(eqn, "fft_lengths"))
    return kind if kind.dim < last else None


def _dynamic_slice(eqn: Any, kinds: list[Kind]) -> Kind | None:
    kind = kinds[0]
    if not kind.rows or any(k.rows for k in kinds[1:]):
        return None
    full = param(eqn, "slice_sizes")[kind.dim] == eqn.invars[0].aval.shape[kind.dim]
    return kind if full else None


def _dynamic_update_slice(eqn: Any, kinds: list[Kind]) -> Kind | None:
    found = agreed(kinds[:2])
    if found is None or not kinds[0].rows or any(k.rows for k in kinds[2:]):
        return None
    operand, update = (v.aval.shape for v in eqn.invars[:2])
    return found if operand[found.dim] == update[found.dim] else None


def _dot(eqn: Any, kinds: list[Kind]) -> Kind | None:
    (contracted, batched) = param(eqn, "dimension_numbers")
    both = together(kinds)
    places: list[int] = []
    summed = False
    for side, (v, kind) in enumerate(zip(eqn.invars, kinds, strict=True)):
        if not kind.rows:
            continue
        other = kinds[1 - side]
        for dims, adds in ((contracted, True), (batched, False)):
            if kind.dim in dims[side]:
                at = list(dims[side]).index(kind.dim)
                if (
                    not other.rows
                    or other.dim != dims[1 - side][at]
                    or agreed([kind.but(dim=0), other.but(dim=0)]) is None
                ):
                    return None
                summed |= adds
                if not adds:
                    places.append(at)
                break
        else:
            taken = {*contracted[side], *batched[side]}
            free = [d for d in range(v.aval.ndim) if d not in taken]
            at = len(batched[0]) + free.index(kind.dim)
            if side:
                left = eqn.invars[0].aval.ndim
                at += left - len(contracted[0]) - len(batched[0])
            places.append(at)
    if any(k.rows and k.index for k in kinds):
        return None
    if summed:
        return Kind("sum", learned=both["learned"]) if not places else None
    if len(set(places)) != 1:
        return None
    outers = {k.outer for k in kinds if k.rows} - {None}
    return Kind("rows", dim=places[0], outer=next(iter(outers), None), **both)


def _convolution(eqn: Any, kinds: list[Kind]) -> Kind | None:
    left, right = kinds
    lhs, rhs, out = param(eqn, "dimension_numbers")
    if left.rows and not right.rows:
        plain = left.dim == lhs[0] and param(eqn, "batch_group_count") == 1
        return left.but(dim=out[0], zero=False) if plain else None
    if left.rows and right.rows and left.dim == lhs[1] and right.dim == rhs[1]:
        same = agreed([left.but(dim=0), right.but(dim=0)])
        if same is not None and param(eqn, "feature_group_count") == 1:
            return Kind("sum", learned=left.learned or right.learned)
    return None


def _gather(eqn: Any, kinds: list[Kind]) -> Kind | None:
    operand, indices = kinds
    dn, sizes = param(eqn, "dimension_numbers"), param(eqn, "slice_sizes")
    ndim = eqn.outvars[0].aval.ndim
    batch = [d for d in range(ndim) if d not in dn.offset_dims]
    both = together(kinds)
    if not operand.rows:
        if indices.dim >= len(batch):
            return None
        return indices.but(dim=batch[indices.dim], zero=False, **both)
    shape, d = eqn.invars[0].aval.shape, operand.dim
    if d in dn.operand_batching_dims:
        at = dn.start_indices_batching_dims[dn.operand_batching_dims.index(d)]
        if not indices.rows or indices.dim != at:
            return None
        return operand.but(dim=batch[at], zero=False, **both)
    if sizes[d] == shape[d] and d not in dn.collapsed_slice_dims:
        window = [
            i
            for i in range(len(shape))
            if i not in dn.collapsed_slice_dims and i not in dn.operand_batching_dims
        ]
        if indices.rows:
            return None
        return operand.but(dim=dn.offset_dims[window.index(d)], zero=False, **both)
    if d in dn.start_index_map and _at_its_own(indices, dn.start_index_map.index(d)):
        return operand.but(dim=batch[indices.dim], zero=False, **both)
    return None


def _at_its_own(indices: Kind, column: int) -> bool:
    """Whether these are the numbers of the rows themselves."""
    return indices.rows and indices.index == "own" and indices.column == column


def _scatter(eqn: Any, kinds: list[Kind]) -> Kind | None:
    operand, indices, updates = kinds
    dn = param(eqn, "dimension_numbers")
    both = together(kinds)
    if not operand.rows:
        adds = eqn.primitive.name in ("scatter-add", "scatter_add")
        summed = operand.name == "sum" or (operand.name == "fixed" and operand.zero)
        if not adds or not summed or updates.index:
            return None
        return Kind("sum", **both)
    d = operand.dim
    outer = operand.outer if operand.outer is not None else updates.outer
    found = operand.but(outer=outer, zero=False, **both)
    if d in dn.operand_batching_dims:
        at = dn.scatter_indices_batching_dims[dn.operand_batching_dims.index(d)]
        return found if indices.rows and indices.dim == at else None
    if d in dn.inserted_window_dims:
        own = d in dn.scatter_dims_to_operand_dims and _at_its_own(
            indices, dn.scatter_dims_to_operand_dims.index(d)
        )
        return found if own else None
    window = [
        i
        for i in range(eqn.invars[0].aval.ndim)
        if i not in dn.inserted_window_dims and i not in dn.operand_batching_dims
    ]
    at = dn.update_window_dims[window.index(d)]
    whole = eqn.invars[2].aval.shape[at] == eqn.invars[0].aval.shape[d]
    return found if whole and not indices.rows and (not updates.rows or updates.dim == at) else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LEADING, _leading),
    **dict.fromkeys([*REDUCTIONS, "reduce_prod", "reduce_xor"], _reduce),
    **dict.fromkeys(["argmax", "argmin"], _argument),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along("axis")),
    **dict.fromkeys(["gather"], _gather),
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
         "scatter-mul", "scatter-min", "scatter-max", "scatter_sub", "scatter-sub"], _scatter
    ),
    **dict.fromkeys(
        ["reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
         "select_and_scatter_add", "select_and_gather_add", "select_and_scatter"], _window
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _fft,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "approx_top_k": _along("reduction_dimension"),
    "unstack": _unstack,
    "top_k": _last,
    "transpose": _transpose,
}  # fmt: skip
"""By primitive."""

OPAQUE = frozenset({
    "custom_partitioning", "ffi_call", "mosaic_gpu", "mosaic_gpu_call", "pallas_call",
    "pure_callback", "shard_map", "core_map", "cudnn_fused_attention", "custom_call",
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fwd", "dot_product_attention_bwd", "scaled_matmul_wrapper",
})  # fmt: skip
"""Kernels, which are taken to work on each row by itself, and to add gradients up over rows."""
