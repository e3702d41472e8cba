"""Dimensions along which the rows of a batch lie, from one trace of a program.

The number of rows says nothing: a width, a vocabulary or the number of layers may be the same. So
the dimensions of the arguments are given, and followed through the equations. A dimension that is
not found costs time or memory, and no number: XLA shards what zerojax leaves to it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend import core

from zerojax.graph.analysis import Analysis
from zerojax.graph.columns import needed_dims
from zerojax.graph.dimensions import names_of
from zerojax.graph.lookups import Lookup
from zerojax.graph.primitives import CONTRACTIONS, REDUCTIONS
from zerojax.graph.regions import regions
from zerojax.xla.jaxprs import open_jaxpr, param
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr


class RowFactor(NamedTuple):
    """Rows along a dimension, or along a factor of it: ``n`` rows of ``t`` tokens make a dimension
    of ``n * t`` elements, of which rows are a factor of ``n`` with stride ``t``.

    Attributes:
      dim: The dimension.
      size: The number of rows.
      stride: The number of elements from one row to the next.
      origin: The position of the argument that the rows come from, among those of the program.
    """

    dim: int
    size: int
    stride: int = 1
    origin: int = -1


Rows = frozenset[RowFactor]
NONE: Rows = frozenset()


@dataclass(frozen=True, eq=False)
class RowDimensions:
    """The dimensions of a program's values along which rows lie.

    Args:
      find: Returns the rows of each variable, also of the programs inside equations; a program that
        several equations run has those of all of them. It is called once somebody asks.
      need: Returns, by variable, the dimensions along which some use needs all entries on one
        device, see :mod:`zerojax.graph.columns`; it is called once somebody asks.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> closed = jax.make_jaxpr(lambda x, w: (x @ w).T)(jnp.ones((8, 3)), jnp.ones((3, 5)))
      >>> jaxpr, _ = open_jaxpr(closed)
      >>> RowDimensions.of_program(jaxpr, [0, None]).dims(jaxpr.outvars[0])
      [1]
    """

    find: Callable[[], Mapping[Atom, Rows]] = dict
    need: Callable[[], Mapping[Atom, frozenset[int]]] = dict

    @functools.cached_property
    def _of(self) -> Mapping[Atom, Rows]:
        return self.find()

    @functools.cached_property
    def _needed(self) -> Mapping[Atom, frozenset[int]]:
        return self.need()

    @classmethod
    def of_program(cls, closed: AnyJaxpr, given: Sequence[int | None]) -> RowDimensions:
        """Returns those of a program.

        Args:
          closed: The program, an open or closed jaxpr.
          given: For each argument the dimension of its rows; None for an argument without rows.
        """
        jaxpr, _ = open_jaxpr(closed)
        rows = [
            frozenset(x._replace(origin=i) for x in whole(v.aval.shape, [] if d is None else [d]))
            for i, (v, d) in enumerate(zip(jaxpr.invars, given, strict=True))
        ]
        return cls(functools.partial(_followed, jaxpr, rows))

    def with_weights(self, closed: AnyJaxpr, split: Sequence[int | None]) -> RowDimensions:
        """Returns these rows with :attr:`need`, of a program whose arguments are weights that are
        sharded along the dimensions ``split``; None for other arguments."""
        jaxpr, _ = open_jaxpr(closed)

        def need() -> Mapping[Atom, frozenset[int]]:
            weights = RowDimensions.of_program(jaxpr, split)

            def same(left: Atom, i: int, right: Atom, j: int) -> bool:
                # Of one weight alone: the activations between two layers are columns of both, and
                # each product decides by its own bytes.
                origins = weights.origins(left, i)
                return len(origins) == 1 and origins == weights.origins(right, j)

            return needed_dims(jaxpr, same, lambda v: bool(self.dims(v)))

        return RowDimensions(self.find, need)

    def dims(self, atom: Atom) -> list[int]:
        """Returns the dimensions of a value along which rows lie, in order."""
        return sorted({x.dim for x in self._rows(atom)})

    def origins(self, atom: Atom, dim: int) -> set[int]:
        """Returns the positions of the arguments whose rows lie along a dimension of a value."""
        return {x.origin for x in self._rows(atom) if x.dim == dim and x.origin >= 0}

    def stays_sharded(self, atom: Atom, dim: int) -> bool:
        """Returns whether no use of a value needs all its entries along a dimension."""
        return atom in self._needed and dim not in self._needed[atom]

    def _rows(self, atom: Atom) -> Rows:
        return NONE if isinstance(atom, core.Literal) else self._of.get(atom, NONE)


def _followed(jaxpr: Jaxpr, given: Sequence[Rows]) -> Mapping[Atom, Rows]:
    """Returns the rows of all variables of a program, from those of its arguments."""
    found: dict[Atom, Rows] = {}
    # Without control: the number of iterations, or the choice of a branch, moves no dimension.
    analysis: Analysis[Rows] = Analysis(
        NONE, operator.or_, _unmoved, control=False, everywhere=found
    )
    for names, rule in _RULES.items():
        analysis.rule(*names.split())(rule)

    def scan(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
        """An iteration takes entries of stacks, and returns entries."""
        (body,) = regions(eqn)
        ins = [_shifted(x, -1) if body.is_entry(i) else x for i, x in enumerate(ins)]
        outs = analysis.through(eqn, ins)
        return [_shifted(x, 1) if body.is_stacked(i) else x for i, x in enumerate(outs)]

    analysis.rule("scan")(scan)
    analysis.forward(jaxpr, given)
    return found


def whole(shape: Sequence[int], dims: Iterable[int]) -> Rows:
    """Returns rows along complete dimensions; a single element is no dimension of rows."""
    return frozenset(RowFactor(d, shape[d]) for d in dims if shape[d] > 1)


def _shifted(rows: Rows, by: int) -> Rows:
    # Rows that a scan iterates over are no dimension of an iteration.
    return frozenset(x._replace(dim=x.dim + by) for x in rows if x.dim + by >= 0)


def _moved(rows: Rows, to: Mapping[int, int]) -> Rows:
    """Returns rows after dimensions have moved; those of other dimensions are gone."""
    return frozenset(x._replace(dim=to[x.dim]) for x in rows if x.dim in to)


def _unmoved(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    """The rule of primitives that leave dimensions where they are: element by element, or along one
    of several dimensions. A dimension of another size may have other rows, see :func:`_parts`."""
    return [_kept(eqn, ins, v.aval.shape, parts=False) for v in eqn.outvars]


def _parts(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    """The rule of primitives that take a part of a dimension, or join parts."""
    return [_kept(eqn, ins, v.aval.shape, parts=True) for v in eqn.outvars]


def _kept(eqn: Equation, ins: Sequence[Rows], shape: Sequence[int], *, parts: bool) -> Rows:
    kept = set[RowFactor]()
    for v, rows in zip(eqn.invars, ins, strict=True):
        old = getattr(v.aval, "shape", ())
        # Operands have equal ranks, but for scalars: a clamp's bounds, a predicate, start indices.
        for x in rows if len(old) == len(shape) else ():
            if old[x.dim] == shape[x.dim]:
                kept.add(x)
            elif parts:
                kept |= whole(shape, [x.dim])
    return frozenset(kept)


def _named(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    """The rule of primitives whose dimensions have names."""
    *operands, result = names_of(eqn) or ()
    moved = (
        _moved(rows, {d: result.index(name) for d, name in enumerate(of) if name in result})
        for rows, of in zip(ins, operands, strict=True)
    )
    return [NONE.union(*moved)]


def _reshape(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    """Counts elements from the end: a dimension with ``k`` elements behind it spans from ``k`` to
    ``k`` times its size, and rows likewise."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    found = set[RowFactor]()
    for x in ins[0]:
        first = math.prod(old[x.dim + 1 :]) * x.stride
        last = first * x.size
        for d, n in enumerate(new):
            behind = math.prod(new[d + 1 :])
            low, high = max(first, behind), min(last, behind * n)
            if low < high:
                found.add(RowFactor(d, high // low, low // behind, x.origin))
    return [frozenset(found)]


def _convolution(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    """Rows are the batch; or groups of features, where ``jax.vmap`` has merged both."""
    lhs, kernel, out = param(eqn, "dimension_numbers")
    in_groups = param(eqn, "batch_group_count") > 1
    # jax.vmap over both operands of a convolution turns each row into a group.
    to_feature = {lhs[1]: out[1]} if param(eqn, "feature_group_count") > 1 else {}
    grouped = {lhs[0]: out[1]} if in_groups else to_feature
    shape = eqn.outvars[0].aval.shape
    rows = _moved(ins[1], {kernel[0]: out[1]})
    rows |= whole(shape, {grouped[x.dim] for x in ins[0] if x.dim in grouped})
    return [rows if in_groups else rows | _moved(ins[0], {lhs[0]: out[0]})]


def _gather(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    """A lookup has the rows of its indices; one that takes rows by indices of their own has them
    wherever it has its indices."""
    lookup, shape = Lookup.of(eqn), eqn.outvars[0].aval.shape
    complete = {d: lookup.window[d] for d in lookup.complete}
    parts = {lookup.window[x.dim] for x in ins[0] if x.dim in lookup.window.keys() - complete}
    rows = _moved(ins[1], dict(enumerate(lookup.by_index))) | _moved(ins[0], complete)
    rows |= whole(shape, parts)
    if not ins[1] and any(x.dim in lookup.picked for x in ins[0]):
        rows |= whole(shape, lookup.by_index)
    return [rows]


def _scatter(eqn: Equation, ins: Sequence[Rows]) -> list[Rows]:
    return [ins[0] | _moved(ins[1], {of: d for d, of in Lookup.of(eqn).batched.items()})]


_RULES = {
    **dict.fromkeys(REDUCTIONS | CONTRACTIONS | {"transpose", "broadcast_in_dim"}, _named),
    "reshape squeeze": _reshape,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "scatter scatter-add scatter-mul scatter-max scatter-min scatter-sub": _scatter,
    "slice dynamic_slice dynamic_update_slice split concatenate pad": _parts,
    "shard_map": _unmoved,  # what runs inside has sizes of its own
}
"""Rules by the names of their primitives."""
