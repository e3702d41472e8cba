"""Which equations work row by row, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.trace.elementwise import ELEMENTWISE
from zerojax.xla.jaxprs import param


class Undivided(Exception):
    """A function cannot be run some rows at a time; the message says why."""


class Sizes(NamedTuple):
    """Rows of the whole batch, and of the part that runs at a time."""

    whole: int
    part: int


# Of each operand and result: the dimension of rows and the entries it has for each; None without.
Rows = Sequence[tuple[int, int] | None]
# Whether an equation with such operands and results takes each row for itself. Its operands or its
# results have rows; all its results have.
Rule = Callable[[Any, Rows, Rows], bool]

SHAPES: Mapping[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("shape", "sharding"),
    "reshape": ("new_sizes", "sharding"),
    "iota": ("shape", "sharding"),
    "slice": ("limit_indices", "start_indices"),
    "dynamic_slice": ("slice_sizes",),
    "gather": ("slice_sizes",),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min"), ("update_jaxpr",)),
}
"""Parameters that say a shape."""


def _same(eqn: Any, ins: Rows, outs: Rows) -> bool:
    """One dimension of rows for all."""
    return len({r for r in (*ins, *outs) if r is not None}) == 1


def _always(eqn: Any, ins: Rows, outs: Rows) -> bool:
    return True


def _but(name: str) -> Rule:
    """Along another dimension, or other dimensions, than the rows'."""

    def rule(eqn: Any, ins: Rows, outs: Rows) -> bool:
        along = param(eqn, name)
        along = along if isinstance(along, tuple | list) else (along,)
        return all(r is None or r[0] not in along for r in ins)

    return rule


def _concatenate(eqn: Any, ins: Rows, outs: Rows) -> bool:
    return _same(eqn, ins, outs) and all(r and r[0] != param(eqn, "dimension") for r in ins)


def _same_operands(eqn: Any, ins: Rows, outs: Rows) -> bool:
    return len(set(ins)) == 1


def _tile(eqn: Any, ins: Rows, outs: Rows) -> bool:
    return ins[0] is not None and ins[0] == outs[0]


def _reshape(eqn: Any, ins: Rows, outs: Rows) -> bool:
    if ins[0] is None or outs[0] is None:
        return False
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return math.prod(old[: ins[0][0]]) == math.prod(new[: outs[0][0]])


def _iota(eqn: Any, ins: Rows, outs: Rows) -> bool:
    return outs[0] is not None and param(eqn, "dimension") != outs[0][0]


def _slice(eqn: Any, ins: Rows, outs: Rows) -> bool:
    if ins[0] is None:
        return False
    d, size = ins[0][0], eqn.invars[0].aval.shape[ins[0][0]]
    strides = param(eqn, "strides")
    return (
        param(eqn, "start_indices")[d] == 0
        and param(eqn, "limit_indices")[d] == size
        and (strides is None or strides[d] == 1)
    )


def _full(eqn: Any, ins: Rows, outs: Rows) -> bool:
    """A slice somewhere, which has all rows: ``dynamic_slice`` and its update."""
    if ins[0] is None or any(r is not None and r[0] != ins[0][0] for r in (*ins, *outs)):
        return False
    d = ins[0][0]
    part = eqn.outvars[0] if eqn.primitive.name == "dynamic_slice" else eqn.invars[1]
    return bool(part.aval.shape[d] == eqn.invars[0].aval.shape[d])


def _pad(eqn: Any, ins: Rows, outs: Rows) -> bool:
    return ins[0] is not None and param(eqn, "padding_config")[ins[0][0]] == (0, 0, 0)


def _dot(eqn: Any, ins: Rows, outs: Rows) -> bool:
    """Each operand with rows has them among its free dimensions, or both among their batches'."""
    (_, _), batch = param(eqn, "dimension_numbers")
    both = all(r is not None for r in ins)
    return not both or any((ins[0][0], ins[1][0]) == p for p in zip(*batch, strict=True))  # type: ignore[index]


def _convolution(eqn: Any, ins: Rows, outs: Rows) -> bool:
    numbers = param(eqn, "dimension_numbers")
    return (
        ins[1] is None
        and ins[0] is not None
        and ins[0][0] == numbers.lhs_spec[0]
        and param(eqn, "batch_group_count") == 1
    )


def _window(eqn: Any, ins: Rows, outs: Rows) -> bool:
    if ins[0] is None:
        return False
    d = ins[0][0]
    sizes = "window_dimensions", "window_strides", "base_dilation", "window_dilation"
    ones = all(param(eqn, name)[d] == 1 for name in sizes)
    return ones and tuple(param(eqn, "padding")[d]) == (0, 0)


def _gather(eqn: Any, ins: Rows, outs: Rows) -> bool:
    numbers, (operand, indices) = param(eqn, "dimension_numbers"), ins
    vector = len(eqn.invars[1].aval.shape) - 1
    if operand is None:  # a lookup of each row's own entries
        return indices is not None and indices[0] != vector
    d = operand[0]
    if indices is None:  # the same entries of each row
        full = param(eqn, "slice_sizes")[d] == eqn.invars[0].aval.shape[d]
        taken = (*numbers.collapsed_slice_dims, *numbers.start_index_map)
        return full and d not in (*taken, *numbers.operand_batching_dims)
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return (d, indices[0]) in pairs and operand[1] == indices[1]


def _scatter(eqn: Any, ins: Rows, outs: Rows) -> bool:
    numbers, (operand, indices, updates) = param(eqn, "dimension_numbers"), ins
    if operand is None or indices is None or updates is None:
        return False
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    return (operand[0], indices[0]) in pairs


_ALSO_ELEMENTWISE = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "conj", "digamma", "erf_inv",
    "erfc", "imag", "lgamma", "nextafter", "population_count", "real", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sinh", "sharding_constraint",
)  # fmt: skip

RULES: Mapping[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, *_ALSO_ELEMENTWISE), _same),
    "optimization_barrier": _always,
    "transpose": _always,
    "squeeze": _always,
    "expand_dims": _always,
    "broadcast_in_dim": _always,
    "reshape": _reshape,
    "iota": _iota,
    "concatenate": _concatenate,
    "stack": _same_operands,
    "unstack": _but("axis"),
    "tile": _tile,
    "slice": _slice,
    "dynamic_slice": _full,
    "dynamic_update_slice": _full,
    "pad": _pad,
    "rev": _but("dimensions"),
    "split": _but("axis"),
    "sort": _but("dimension"),
    "top_k": _but("axis"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _but("axis")),
    **dict.fromkeys(("argmax", "argmin"), _but("axes")),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _but("axes"),
    ),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min"), _scatter),
}
