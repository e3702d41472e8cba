"""Rules for how equations carry the rows of a batch from their operands to their result.

Each rule takes the equation on symbolic rows and the kinds of its operands, at least one of them
"rows", the others "rows", "fixed" or "own" (for a scatter-add's first also "sum"). It returns
the layout of rows in the result (or in each result), a reduction such as "sum" if the equation
reduces over rows, or None if the equation mixes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zerojax.accumulation.kinds import Kinds, RowKind, shared_layout
from zerojax.accumulation.product_rules import convolution, lookup, product, scatter
from zerojax.accumulation.reductions import REDUCES
from zerojax.accumulation.symbolic import is_symbolic
from zerojax.graph.primitives import (
    BY_ROW,
    CUMULATIVE,
    FACTORIZATIONS,
    LABELS,
    SCATTERS,
    WINDOWS,
)
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation

Rule = Callable[[Equation, Kinds], "RowKind | None"]


def _elementwise(eqn: Equation, kinds: Kinds) -> RowKind | None:
    layout = shared_layout(kinds)
    if layout is None:
        return None
    ranks = {v.aval.ndim for v, k in zip(eqn.invars, kinds, strict=True) if k.rows}
    if len(ranks) != 1:
        return None
    return layout.but(index=_index_of(eqn, kinds)) if layout.index else layout


def _index_of(eqn: Equation, kinds: Kinds) -> str:
    """Returns the ``index`` of the result. Row indices stay "own" through the check for negative
    indices that numpy's indexing adds."""
    name = eqn.primitive.name
    if name in LABELS or name == "convert_element_type":
        return kinds[0].index
    if name == "lt" and kinds[0].index == "own" and kinds[1].zero:
        return "negative"
    if name == "select_n" and kinds[1].index == "own":
        return "own" if kinds[0].index == "negative" or kinds[0].zero else "number"
    return "number"


def _reduce(eqn: Equation, kinds: Kinds) -> RowKind | None:
    axes = param(eqn, "axes")
    (kind,) = kinds
    if kind.dim not in axes:
        index = "number" if kind.index else ""
        return kind.but(dim=kind.dim - sum(a < kind.dim for a in axes), zero=False, index=index)
    name = "reduce_sum" if eqn.primitive.name == "psum" else eqn.primitive.name
    if kind.index or name not in REDUCES:
        return None
    return RowKind(REDUCES[name], learned=kind.learned)


def _psum(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Accepts the sum over an axis of ``jax.vmap`` as that over a dimension."""
    return _reduce(eqn, kinds) if len(kinds) == 1 else None


def _broadcast(eqn: Equation, kinds: Kinds) -> RowKind | None:
    kind = kinds[0]
    return kind.but(dim=param(eqn, "broadcast_dimensions")[kind.dim])


def _transpose(eqn: Equation, kinds: Kinds) -> RowKind | None:
    (kind,) = kinds
    return kind.but(dim=list(param(eqn, "permutation")).index(kind.dim))


def _reshape(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Finds the dimension of the result that holds the rows, and the number of their stretches in
    it; None if no dimension holds complete stretches."""
    old: Sequence[int]
    kind = kinds[0]
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    order = param(eqn, "dimensions", None)  # of the operand, which is transposed first
    if order is not None:
        old, kind = [old[d] for d in order], kind.but(dim=[*order].index(kind.dim))
    places = [d for d, n in enumerate(new) if is_symbolic(n)]
    if len(places) != 1:
        return None
    (dim,) = places
    outer, left = divmod(math.prod(old[: kind.dim]) * (kind.outer or 1), math.prod(new[:dim]))
    if left or not outer or new[dim] % outer:
        return None
    alike = kind.outer is None and new[dim] == old[kind.dim]
    return kind.but(dim=dim, outer=None if alike else outer)


def _squeeze(eqn: Equation, kinds: Kinds) -> RowKind | None:
    (kind,) = kinds
    gone = param(eqn, "dimensions")
    return None if kind.dim in gone else kind.but(dim=kind.dim - sum(d < kind.dim for d in gone))


def _slice(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Accepts a slice of the complete dimension of rows, or of complete stretches."""
    (kind,) = kinds
    n, strides = eqn.invars[0].aval.shape[kind.dim], param(eqn, "strides")
    start, limit = (param(eqn, f"{end}_indices")[kind.dim] for end in ("start", "limit"))
    stride = 1 if strides is None else strides[kind.dim]
    if (start, limit, stride) == (0, n, 1):
        return kind
    if kind.outer is None:
        return kind if stride == 1 else None
    size = n // kind.outer
    if stride != 1 or start % size or limit % size or start == limit:
        return None
    return kind.but(outer=(limit - start) // size)


def _split(eqn: Equation, kinds: Kinds) -> RowKind | None:
    (kind,) = kinds
    sizes = param(eqn, "sizes")
    if param(eqn, "axis") != kind.dim:
        return kind
    if len(set(sizes)) != 1 or (kind.outer or len(sizes)) % len(sizes):
        return None
    return kind.but(outer=None if kind.outer is None else kind.outer // len(sizes))


def _concatenate(eqn: Equation, kinds: Kinds) -> RowKind | None:
    layout = shared_layout(kinds)
    along = param(eqn, "dimension")
    if layout is None:
        return None
    if along != layout.dim:
        return _joined_layout(eqn, kinds, layout, along)
    sizes = {v.aval.shape[along] for v in eqn.invars}
    if not all(k.rows for k in kinds) or layout.outer not in (1, None) or len(sizes) != 1:
        return None
    return layout.but(outer=len(kinds))


def _joined_layout(eqn: Equation, kinds: Kinds, layout: RowKind, along: int) -> RowKind:
    """Returns the layout of arrays joined along another dimension than the rows. Row indices may be
    one column among others."""
    indexed = [i for i, k in enumerate(kinds) if k.index]
    last = along == eqn.outvars[0].aval.ndim - 1
    if last and len(indexed) == 1 and kinds[indexed[0]].index == "own":
        before = eqn.invars[: indexed[0]]
        column = sum(v.aval.shape[along] if v.aval.ndim > along else 1 for v in before)
        return layout.but(index="own", column=column)
    return layout


def _stack(eqn: Equation, kinds: Kinds) -> RowKind | None:
    layout, along = shared_layout(kinds), param(eqn, "axis") % eqn.outvars[0].aval.ndim
    if layout is None:
        return None
    return _joined_layout(eqn, kinds, layout.but(dim=layout.dim + (along <= layout.dim)), along)


def _unstack(eqn: Equation, kinds: Kinds) -> RowKind | None:
    (kind,) = kinds
    along = param(eqn, "axis") % eqn.invars[0].aval.ndim
    return None if along == kind.dim else kind.but(dim=kind.dim - (along < kind.dim))


def _pad(eqn: Equation, kinds: Kinds) -> RowKind | None:
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
    """Returns a rule for primitives that work along one dimension (or several), separately for
    each entry of the others."""

    def rule(eqn: Equation, kinds: Kinds) -> RowKind | None:
        layout, along = shared_layout(kinds), param(eqn, parameter)
        along = along if isinstance(along, tuple | list) else (along,)
        n = eqn.invars[0].aval.ndim
        if layout is None or layout.dim in [a % n for a in along]:
            return None
        return layout

    return rule


def _tile(eqn: Equation, kinds: Kinds) -> RowKind | None:
    (kind,) = kinds
    return kind if param(eqn, "reps")[kind.dim] == 1 else None


def _window(eqn: Equation, kinds: Kinds) -> RowKind | None:
    kind = shared_layout(kinds)
    if kind is None:
        return None
    ndim = eqn.invars[0].aval.ndim
    sizes = "window_dimensions", "window_strides", "base_dilation", "window_dilation"
    if any((param(eqn, name, None) or (1,) * ndim)[kind.dim] != 1 for name in sizes):
        return None
    padding = param(eqn, "padding", None)
    return kind if padding is None or tuple(padding[kind.dim]) == (0, 0) else None


def _leading(eqn: Equation, kinds: Kinds) -> RowKind | None:
    layout, before = shared_layout(kinds), eqn.invars[0].aval.ndim - 2
    return layout if layout is not None and layout.dim < before else None


def _fft(eqn: Equation, kinds: Kinds) -> RowKind | None:
    (kind,) = kinds
    last = eqn.invars[0].aval.ndim - len(param(eqn, "fft_lengths"))
    return kind if kind.dim < last else None


def _dynamic_slice(eqn: Equation, kinds: Kinds) -> RowKind | None:
    kind = kinds[0]
    if not kind.rows or any(k.rows for k in kinds[1:]):
        return None
    full = param(eqn, "slice_sizes")[kind.dim] == eqn.invars[0].aval.shape[kind.dim]
    return kind if full else None


def _dynamic_update_slice(eqn: Equation, kinds: Kinds) -> RowKind | None:
    layout = shared_layout(kinds[:2])
    if layout is None or not kinds[0].rows or any(k.rows for k in kinds[2:]):
        return None
    operand, update = (v.aval.shape for v in eqn.invars[:2])
    return layout if operand[layout.dim] == update[layout.dim] else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(BY_ROW, _elementwise),
    **dict.fromkeys(FACTORIZATIONS, _leading),
    **dict.fromkeys([*REDUCES, "reduce_xor", "argmax", "argmin"], _reduce),
    **dict.fromkeys(CUMULATIVE, _along("axis")),
    "gather": lookup,
    **dict.fromkeys(SCATTERS, scatter),
    **dict.fromkeys(WINDOWS, _window),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": convolution,
    "dot_general": product,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _fft,
    "pad": _pad,
    "psum": _psum,
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
    "transpose": _transpose,
}  # fmt: skip
"""Rules by the name of the primitive."""
