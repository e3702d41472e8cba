"""Names of the dimensions of an equation's operands and results, as of an einsum.

    logits[b, t, v] = x[b, t, d] * w[d, v]
    lse[b, t] = logsumexp over v of logits[b, t, v]

Dimensions with one name count the same entries: an entry of the results depends on the operands'
entries of the same names alone, so that a device, or an iteration, can compute some of them without
the others. A dimension that the results lack is reduced, or looked up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from jax.extend import core

from zerojax.graph.contractions import Contraction
from zerojax.graph.lookups import Lookup
from zerojax.graph.primitives import CONTRACTIONS, ELEMENTWISE, REDUCTIONS, SCATTERS
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Atom, Equation, MaybeNone

Name = int | None
"""None for a dimension whose entries move, or depend on each other."""

ALONE = -1
"""The name of a dimension of one entry, which may belong to all entries of another dimension."""

Names = Sequence[Sequence[Name]]
"""For each operand, and then for each result, the names of its dimensions."""


def names_of(eqn: Equation) -> Names | MaybeNone:
    """Returns the names of an equation's dimensions; None for primitives without a rule.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> traced = jax.make_jaxpr(lambda x: jnp.max(x, 1))(jnp.ones((2, 3, 4)))
      >>> names_of(traced.eqns[0])
      [(0, 1, 2), [0, 2]]
    """
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn)


def same_dimensions(
    equations: Sequence[Equation],
    start: tuple[Atom, int],
    names: Callable[[Equation], Names | MaybeNone] = names_of,
) -> Mapping[Atom, int] | None:
    """Returns, by value, the dimension that counts the same entries as one of another value.

    None if an equation has no names, or if a value has two such dimensions.

    Args:
      equations: The equations that compute the values, or take them.
      start: A value and one of its dimensions.
      names: Returns the names of an equation's dimensions.
    """
    alike = defaultdict[tuple[Atom, int], list[tuple[Atom, int]]](list)
    for eqn in equations:
        if (named := names(eqn)) is None:
            return None
        groups = defaultdict[Name, list[tuple[Atom, int]]](list)
        for v, of in zip((*eqn.invars, *eqn.outvars), named, strict=True):
            for d, name in enumerate(() if isinstance(v, core.Literal) else of):
                groups[name].append((v, d))
        for group in (group for name, group in groups.items() if name not in (None, ALONE)):
            for each in group:
                alike[each] += group
    found, todo = {start}, [start]
    while todo:
        new = {*alike[todo.pop()]} - found
        found |= new
        todo += new
    dims = dict(found)
    return dims if len(dims) == len(found) else None


def _shape(eqn: Equation, i: int) -> tuple[int, ...]:
    return tuple((*eqn.invars, *eqn.outvars)[i].aval.shape)


def _elementwise(eqn: Equation) -> Names:
    # Operands have the rank of the result, but for scalars: a clamp's bounds, a predicate.
    shape = _shape(eqn, -1)
    operands = (_shape(eqn, i) for i in range(len(eqn.invars)))
    named = [[d if n == shape[d] else ALONE for d, n in enumerate(old)] for old in operands]
    return [*named, tuple(range(len(shape)))]


def _barrier(eqn: Equation) -> Names:
    first, names = 0, []
    for v in eqn.invars:
        names.append(tuple(range(first, first + v.aval.ndim)))
        first += v.aval.ndim
    return [*names, *names]


def _transpose(eqn: Equation) -> Names:
    return [tuple(range(eqn.invars[0].aval.ndim)), tuple(param(eqn, "permutation"))]


def _broadcast(eqn: Equation) -> Names:
    result = tuple(range(eqn.outvars[0].aval.ndim))
    old, new = _shape(eqn, 0), _shape(eqn, -1)
    dims = param(eqn, "broadcast_dimensions")
    # A dimension of size 1 that grows is another one.
    operand = [d if old[i] == new[d] else ALONE for i, d in enumerate(dims)]
    return [operand, *[()] * (len(eqn.invars) - 1), result]


def _reshape(eqn: Equation) -> Names:
    """Dimensions stay that have the same size, and as many elements before them."""
    old, new = _shape(eqn, 0), _shape(eqn, -1)
    before = {(math.prod(old[:i]), n): i for i, n in enumerate(old) if n > 1}
    result = [before.get((math.prod(new[:i]), n)) for i, n in enumerate(new)]
    operand = [d if d in result else ALONE if n == 1 else None for d, n in enumerate(old)]
    return [operand, *[()] * (len(eqn.invars) - 1), result]


def _reduce(eqn: Equation) -> Names:
    operand, axes = tuple(range(eqn.invars[0].aval.ndim)), param(eqn, "axes")
    return [operand, [d for d in operand if d not in axes]]


def _product(eqn: Equation) -> Names:
    return Contraction.of(eqn).names


def _slice(eqn: Equation) -> Names:
    """Dimensions stay of which no entry is left out, added or moved."""
    old, new = _shape(eqn, 0), _shape(eqn, -1)
    padding = eqn.params.get("padding_config", [()] * len(old))
    pairs = enumerate(zip(old, new, padding, strict=True))
    names = [d if n == m and not any(added) else None for d, (n, m, added) in pairs]
    return [names, *[()] * (len(eqn.invars) - 1), names]


def _gather(eqn: Equation) -> Names:
    lookup, (array, indices, windows) = Lookup.of(eqn), (_shape(eqn, i) for i in (0, 1, -1))
    return _lookup(lookup, len(array), len(indices), len(windows))


def _scatter(eqn: Equation) -> Names:
    lookup, (array, indices, windows) = Lookup.of(eqn), (_shape(eqn, i) for i in (0, 1, 2))
    names = _lookup(lookup, len(array), len(indices), len(windows))
    return [*names, names[0]]


def _lookup(lookup: Lookup, array: int, indices: int, windows: int) -> list[Sequence[Name]]:
    """Returns the names of an array's dimensions, of its indices' and of its windows'."""
    by_index = [array + i for i in range(indices - 1)]
    named: list[Name] = [*range(array)]
    for d, i in lookup.batched.items():
        named[d] = by_index[i]
    for d in lookup.window:
        if d not in lookup.complete:
            named[d] = None
    of_windows: list[Name] = [None] * windows
    for d, at in lookup.window.items():
        of_windows[at] = named[d]
    for at, name in zip(lookup.by_index, by_index, strict=True):
        of_windows[at] = name
    return [named, [*by_index, None], of_windows]


_RULES: Mapping[str, Callable[[Equation], Names]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "optimization_barrier": _barrier,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _slice),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(CONTRACTIONS, _product),
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}
"""Rules by the names of their primitives."""
