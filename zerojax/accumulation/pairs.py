"""Equations of a step traced on the global batch, matched with those traced on a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend import core

from zerojax.accumulation.lines import where
from zerojax.graph.primitives import KERNELS
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, HasEquations, Shaped

_GROUPS = frozenset({"feature_group_count", "batch_group_count"})
"""Parameters that count rows where ``jax.vmap`` has turned each row into a group."""


class Sizes(NamedTuple):
    """Rows of the global batch, and of a micro-batch; neither need divide the other.

    Attributes:
      global_rows, micro_rows: The numbers of rows.
      neighbours: Whether a micro-batch has rows that are neighbours in the batch, so that groups
        of neighbours stay together.
      devices: The devices among which the rows of every traced batch must divide.
    """

    global_rows: int
    micro_rows: int
    neighbours: bool = True
    devices: int = 1

    @property
    def traced(self) -> int:
        """Rows to trace a micro-batch with, see :mod:`zerojax.accumulation.resize`."""
        if self.devices > 1:
            rows = self.micro_rows * self.devices
            return rows if rows != self.global_rows else 2 * rows
        return self.micro_rows if self.micro_rows > 1 else 2 if self.global_rows != 2 else 3

    def fit(self, global_size: int, micro_size: int) -> bool:
        """Returns whether two sizes of a dimension are equal, or in proportion to the rows."""
        return (
            global_size == micro_size
            or global_size * self.micro_rows == micro_size * self.global_rows
        )


class EquationPair(NamedTuple):
    """One equation, on the global batch (``global_eqn``) and on a micro-batch (``micro_eqn``)."""

    global_eqn: Equation
    micro_eqn: Equation


class UnevenError(Exception):
    """The step's program depends on the number of rows; the argument says where.

    Attributes:
      remedy: What to write instead, if known.
    """

    remedy: str | None = None


def pairs(
    global_program: HasEquations, micro_program: HasEquations, sizes: Sizes
) -> Iterator[EquationPair]:
    """Matches the equations of two programs, open jaxprs or flat ones.

    Raises:
      UnevenError: The programs differ in more than shapes.
    """
    given = [(*program.constvars, *program.invars) for program in (global_program, micro_program)]
    if len(given[0]) != len(given[1]):
        raise UnevenError("it has other constants")
    micro_of = dict(zip(*given, strict=True))

    def matched(w: Atom, m: Atom) -> bool:
        literals = isinstance(w, core.Literal), isinstance(m, core.Literal)
        return all(literals) if any(literals) else micro_of[w] is m

    n = len(global_program.eqns), len(micro_program.eqns)
    for i in range(max(n)):
        if i >= min(n):
            raise UnevenError(where((global_program if i < n[0] else micro_program).eqns[i]))
        eqn, micro_eqn = global_program.eqns[i], micro_program.eqns[i]
        alike = _alike(eqn, micro_eqn, sizes) and len(eqn.invars) == len(micro_eqn.invars)
        if not alike or not all(map(matched, eqn.invars, micro_eqn.invars)):
            raise UnevenError(where(eqn))
        micro_of.update(zip(eqn.outvars, micro_eqn.outvars, strict=True))
        yield EquationPair(eqn, micro_eqn)
    if not all(map(matched, global_program.outvars, micro_program.outvars)):
        raise UnevenError("it returns other values")


def _alike(one: Equation, other: Equation, sizes: Sizes) -> bool:
    """Returns whether the equations differ at most in the number of rows."""
    shapes = _shapes(one), _shapes(other)
    if one.primitive != other.primitive or len(shapes[0]) != len(shapes[1]):
        return False
    if shapes[0] == shapes[1]:
        return True
    alike = all(
        len(a) == len(b)
        and all((m and w % m == 0) or sizes.fit(w, m) for w, m in zip(a, b, strict=True))
        for a, b in zip(*shapes, strict=True)
    )
    return alike and not other_numbers(EquationPair(one, other))


def _shapes(eqn: Equation) -> list[tuple[int, ...]]:
    return [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]


def other_numbers(pair: EquationPair) -> bool:
    """Returns whether the equations' parameters hold different numbers, such as an exponent or the
    column where a slice begins. The sizes of dimensions that grow with the rows do not count, nor
    do the parameters of kernels and of equations with inner programs."""
    global_eqn, micro_eqn = pair
    if global_eqn.primitive.name in KERNELS or jaxprs.programs(global_eqn):
        return False
    grow = {d for w, m in zip(*map(_shapes, pair), strict=True) for d in _differ(w, m)}
    for name, w in global_eqn.params.items():
        m = micro_eqn.params.get(name)
        if isinstance(w, tuple) and isinstance(m, tuple) and len(w) == len(m):
            if name != "sizes" and _differ(w, m) - grow:  # a split's sizes are of one dimension
                return True
        elif name not in _GROUPS and _differ([w], [m]):
            return True
    return False


def _differ(one: Sequence[object], other: Sequence[object]) -> set[int]:
    """Returns the positions of numbers, or of tuples of numbers, that differ."""
    both = enumerate(zip(one, other, strict=True))
    numbers = int | float | np.number | tuple
    return {
        i
        for i, (a, b) in both
        if isinstance(a, numbers) and isinstance(b, numbers) and a != b and (a == a or b == b)
    }


def alike_in_shape(pair: EquationPair) -> bool:
    """Returns whether no operand and no result of an equation grows with the rows."""
    global_shapes, micro_shapes = (_shapes(eqn) for eqn in pair)
    return global_shapes == micro_shapes


def scaled(global_aval: Shaped, micro_aval: Shaped) -> list[int]:
    """Returns the dimensions in which an array grows with the number of rows."""
    shapes = zip(global_aval.shape, micro_aval.shape, strict=True)
    return [i for i, (a, b) in enumerate(shapes) if a != b]


def other_literals(global_atom: Atom, micro_atom: Atom) -> bool:
    """Returns whether two atoms are literals of different numbers, such as the number of rows."""
    if not (isinstance(global_atom, core.Literal) and isinstance(micro_atom, core.Literal)):
        return False
    return not np.ndim(global_atom.val) and bool(global_atom.val != micro_atom.val)
