"""Rules for how equations carry the rows of a batch from their operands to their result.

Each rule takes the equation on symbolic rows and the kinds of its operands, at least one of them
"rows", the others "rows", "fixed" or "own" (for a scatter-add's first also "sum"). It returns the
layout of rows in the result (or in each result), a reduction such as "sum" if the equation reduces
over rows, or None if the equation mixes rows.

Which dimension of the result has rows shows in its shape: a rule only says whether each row stays
apart. See :mod:`zerojax.accumulation.product_rules` for products, lookups and scatters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from zerojax.accumulation.kinds import Kinds, RowKind, shared_layout
from zerojax.accumulation.product_rules import apart, convolution, lookup, moved, product, scatter
from zerojax.accumulation.reductions import REDUCES
from zerojax.graph.primitives import (
    BY_ROW,
    CONTRACTIONS,
    CUMULATIVE,
    FACTORIZATIONS,
    LABELS,
    SCATTERS,
    WINDOWS,
)
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation

Rule = Callable[[Equation, Kinds], "RowKind | None"]
Dimensions = Callable[[Equation], Collection[int]]


def _elementwise(eqn: Equation, kinds: Kinds) -> RowKind | None:
    layout = apart(eqn, kinds)
    return layout and (layout.but(index=_index_of(eqn, kinds)) if layout.index else layout)


def _index_of(eqn: Equation, kinds: Kinds) -> str:
    """Returns the ``index`` of the result."""
    name = eqn.primitive.name
    if name in LABELS or name == "convert_element_type":
        return kinds[0].index
    # jnp's indexing compares indices with 0, and adds the size to the negative ones.
    if name == "lt" and kinds[0].index == "own" and kinds[1].zero:
        return "negative"
    if name == "select_n" and kinds[1].index == "own":
        return "own" if kinds[0].index == "negative" or kinds[0].zero else "number"
    return "number"


def _reduce(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Accepts a reduction over rows, or over other dimensions. A ``psum`` over an axis of
    ``jax.vmap`` is a sum over a dimension."""
    (kind, *more) = kinds
    if more:
        return None
    if kind.dim not in param(eqn, "axes"):
        return apart(eqn, kinds)
    name = "reduce_sum" if eqn.primitive.name == "psum" else eqn.primitive.name
    if kind.index or name not in REDUCES:
        return None
    return RowKind(REDUCES[name], learned=kind.learned)


def _reshape(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Finds the number of stretches of rows in the dimension of the result; None if it has no
    complete stretches."""
    old: Sequence[int]
    kind, layout = kinds[0], moved(eqn, kinds[0])
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    order = param(eqn, "dimensions", None)  # of the operand, which is transposed first
    if order is not None:
        old, kind = [old[d] for d in order], kind.but(dim=[*order].index(kind.dim))
    if layout is None:
        return None
    before = math.prod(old[: kind.dim]) * (kind.outer or 1)
    outer, left = divmod(before, math.prod(new[: layout.dim]))
    if left or not outer or new[layout.dim] % outer:
        return None
    alike = kind.outer is None and new[layout.dim] == old[kind.dim]
    return layout.but(outer=None if alike else outer)


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
        return _joined(eqn, kinds, layout, along)
    sizes = {v.aval.shape[along] for v in eqn.invars}
    if not all(k.rows for k in kinds) or layout.outer not in (1, None) or len(sizes) != 1:
        return None
    return layout.but(outer=len(kinds))


def _joined(eqn: Equation, kinds: Kinds, layout: RowKind, along: int) -> RowKind:
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
    layout, along = apart(eqn, kinds), param(eqn, "axis") % eqn.outvars[0].aval.ndim
    return layout and _joined(eqn, kinds, layout, along)


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


def _move(eqn: Equation, kinds: Kinds) -> RowKind | None:
    return moved(eqn, kinds[0])


def _works_along(dimensions: Dimensions) -> Rule:
    """Returns a rule for primitives that work along some dimensions, separately for each entry of
    the others."""

    def rule(eqn: Equation, kinds: Kinds) -> RowKind | None:
        n = eqn.invars[0].aval.ndim
        along = {d % n for d in dimensions(eqn)}
        return None if any(k.rows and k.dim in along for k in kinds) else apart(eqn, kinds)

    return rule


def _named(parameter: str) -> Rule:
    """Returns the rule for the dimension or the dimensions in a parameter."""

    def dimensions(eqn: Equation) -> Collection[int]:
        along = param(eqn, parameter)
        return along if isinstance(along, tuple | list) else (along,)

    return _works_along(dimensions)


def _of_window(eqn: Equation) -> Collection[int]:
    ndim = eqn.invars[0].aval.ndim
    sizes = "window_dimensions", "window_strides", "base_dilation", "window_dilation"
    padding = param(eqn, "padding", None) or ((0, 0),) * ndim
    return [
        d
        for d in range(ndim)
        if tuple(padding[d]) != (0, 0)
        or any((param(eqn, name, None) or (1,) * ndim)[d] != 1 for name in sizes)
    ]


def _update(eqn: Equation, kinds: Kinds) -> RowKind | None:
    """Accepts a ``dynamic_slice`` of all rows, or a ``dynamic_update_slice`` in all rows."""
    n = 1 if eqn.primitive.name == "dynamic_slice" else 2
    if not kinds[0].rows or any(k.rows for k in kinds[n:]):
        return None
    part = param(eqn, "slice_sizes") if n == 1 else eqn.invars[1].aval.shape
    d = kinds[0].dim
    layout = moved(eqn, kinds[0]) if n == 1 else apart(eqn, kinds[:n])
    return layout if part[d] == eqn.invars[0].aval.shape[d] else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(BY_ROW, _elementwise),
    **dict.fromkeys(FACTORIZATIONS, _works_along(lambda eqn: (-2, -1))),
    **dict.fromkeys([*REDUCES, "psum", "reduce_xor", "argmax", "argmin"], _reduce),
    **dict.fromkeys(CUMULATIVE, _named("axis")),
    "gather": lookup,
    **dict.fromkeys(SCATTERS, scatter),
    **dict.fromkeys(WINDOWS, _works_along(_of_window)),
    **dict.fromkeys(["broadcast_in_dim", "squeeze", "transpose"], _move),
    "approx_top_k": _named("reduction_dimension"),
    "concatenate": _concatenate,
    "conv_general_dilated": convolution,
    **dict.fromkeys(CONTRACTIONS, product),
    "dynamic_slice": _update,
    "dynamic_update_slice": _update,
    "fft": _works_along(lambda eqn: range(-len(param(eqn, "fft_lengths")), 0)),
    "pad": _pad,
    "reshape": _reshape,
    "rev": _named("dimensions"),
    "slice": _slice,
    "sort": _named("dimension"),
    "split": _split,
    "stack": _stack,
    "tile": _works_along(lambda eqn: [d for d, n in enumerate(param(eqn, "reps")) if n != 1]),
    "unstack": _named("axis"),
}
"""Rules by the name of the primitive."""
