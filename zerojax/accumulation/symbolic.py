"""Programs on a symbolic number of rows.

A dimension has rows of the batch if its size is symbolic, :func:`jax.export.symbolic_shape`, and
not because it has as many elements as the batch has rows: that may be a width, a vocabulary or the
number of layers. :mod:`zerojax.accumulation.traces` makes such programs, and
:mod:`zerojax.accumulation.instances` puts numbers into them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias, cast

import jax

from zerojax.accumulation.flat import Flat
from zerojax.xla import jaxprs
from zerojax.xla.lines import where
from zerojax.xla.rewriter import are_same
from zerojax.xla.types import AnyJaxpr, Atom, Equation, HasEquations, Jaxpr, Value

Size: TypeAlias = Any
"""The size of a dimension: an int, or a symbolic dimension of ``jax.export``."""

# jax.export does not export the class.
_Dimension = type(jax.export.symbolic_shape("b")[0])


class UnevenError(Exception):
    """Error for a program that depends on the number of rows; the message says where.

    Attributes:
      contrast: How the traces differ there, if known, to be read after the message.
      remedy: What to write instead, if known.
    """

    contrast = ""
    remedy: str | None = None

    @classmethod
    def with_contrast(cls, contrast: str) -> UnevenError:
        """Returns the error for an equation that :meth:`located` names."""
        error = cls()
        error.contrast = contrast
        return error

    def located(self, eqn: Equation) -> UnevenError:
        """Returns the error, which names an equation if it names none yet."""
        self.args = (str(self) or where(eqn),)
        return self


class TracedRows:
    """Two numbers of rows that a program is traced on, and the sizes of dimensions of both traces.

    Args:
      one, two: The numbers of rows.

    Attributes:
      traced: Both numbers.

    Example:
      >>> rows = TracedRows(32, 8)
      >>> rows.size(96, 24), rows.size(64, 64)
      (24*b, 64)
      >>> rows.at(rows.size(96, 24), 2), rows.per_row(rows.size(96, 24))
      (6, Fraction(3, 1))
    """

    def __init__(self, one: int, two: int) -> None:
        self.traced = one, two
        # The symbol is the number of parts of this many rows, so that it is known what divides a
        # size: JAX knows that 2 divides 8 * b, and of b it does not.
        self._unit = math.gcd(one, two)
        self._scope = jax.export.SymbolicScope()
        (self._symbol,) = jax.export.symbolic_shape("b", scope=self._scope)
        self._sizes: dict[tuple[int, int], Size] = {}
        self._known: dict[Size, tuple[int, int]] = {}

    @classmethod
    def of(cls, full: int, part: int) -> TracedRows:
        """Returns the rows to trace a batch of ``full`` rows with, and parts of it."""
        # Not a single row: jax traces another program where a dimension has one element.
        return cls(full, next(n for n in (part, 2, 3) if n > 1 and n != full))

    def size(self, one: int, two: int) -> Size:
        """Returns the size of a dimension that has these sizes in the traces: a multiple of the
        symbol if it grows in proportion to the rows, another symbol if it differs otherwise."""
        if one == two:
            return one
        if (one, two) not in self._sizes:
            times, left = divmod(one * self._unit, self.traced[0])
            new = times * self._symbol
            if left or not self._is_proportional(one, two):
                name = f"size{len(self._sizes)}"
                (new,) = jax.export.symbolic_shape(name, scope=self._scope)
            self._sizes[one, two] = new
            self._known[new] = one, two
        return self._sizes[one, two]

    def fit(self, one: int, two: int) -> bool:
        """Returns whether a dimension of one program can have these sizes in the traces."""
        return self._is_proportional(one, two) or (two > 0 and one % two == 0)

    def _is_proportional(self, one: int, two: int) -> bool:
        return one * self.traced[1] == two * self.traced[0]

    def at(self, size: Size, rows: int) -> int:
        """Returns a size for a number of rows.

        Raises:
          UnevenError: The size is not known, or not whole, for as many rows.
        """
        if not is_symbolic(size):
            return int(size)
        one, two = self._known[size]
        if rows in self.traced:
            return (one, two)[self.traced.index(rows)]
        exact = Fraction(one * rows, self.traced[0])
        if exact.denominator != 1 or not self._is_proportional(one, two):
            raise UnevenError.with_contrast(f" with {one} elements for {self.traced[0]} rows")
        return exact.numerator

    def shape(self, atom: Atom, rows: int) -> tuple[int, ...]:
        """Returns the shape of a variable for a number of rows, see :meth:`at`."""
        return tuple(self.at(n, rows) for n in atom.aval.shape)

    def per_row(self, size: Size) -> Fraction | None:
        """Returns how many elements a symbolic size has for each row; None if it does not grow in
        proportion to the rows."""
        one, two = self._known[size]
        return Fraction(one, self.traced[0]) if self._is_proportional(one, two) else None


def is_symbolic(value: object) -> bool:
    """Returns whether a size, or a parameter of an equation, is symbolic."""
    return isinstance(value, _Dimension)


def growing(atom: Atom) -> list[int]:
    """Returns the dimensions in which a value grows with the number of rows."""
    shape = getattr(atom.aval, "shape", ())
    return [d for d, n in enumerate(shape) if isinstance(n, _Dimension)]


def grows(eqn: Equation) -> bool:
    """Returns whether an operand or a result of an equation grows with the number of rows."""
    return any(map(growing, (*eqn.invars, *eqn.outvars)))


@dataclass(frozen=True, eq=False)
class Both:
    """A parameter of an equation that is known for two numbers of rows only.

    Attributes:
      one, two: The values in the traces.
    """

    one: Value
    two: Value


@dataclass(frozen=True, eq=False)
class Symbolic:
    """A program on symbolic rows.

    Attributes:
      flat: The program. Values that do not grow have the variables of the first trace.
      rows: The numbers of rows of the traces; those of the first are the global batch's.
      numbers: For each variable in place of a literal, the literals of the traces.
      consts: The arrays that the traces close over.
    """

    flat: Flat
    rows: TracedRows
    numbers: Mapping[Atom, tuple[Value, Value]]
    consts: tuple[Sequence[Value], Sequence[Value]]

    @property
    def global_rows(self) -> int:
        """The number of rows of the global batch."""
        return self.rows.traced[0]

    def global_shape(self, atom: Atom) -> tuple[int, ...]:
        """Returns the shape of a variable on the global batch."""
        return self.rows.shape(atom, self.global_rows)


class Body(NamedTuple):
    """The contents of an open jaxpr, or of a flat program."""

    constvars: list[Atom]
    invars: list[Atom]
    eqns: list[Equation]
    outvars: list[Atom]


def map_equations(change: Callable[..., Equation], *programs: HasEquations) -> list[Equation]:
    """Maps the equations of a program, or those of several side by side, of which one that has
    fewer gives None.

    Raises:
      UnevenError: ``change`` raises it; names the equation.
    """
    new: list[Equation] = []
    for eqns in itertools.zip_longest(*(program.eqns for program in programs)):
        try:
            new.append(change(*eqns))
        except UnevenError as e:
            raise e.located(next(filter(None, eqns))) from None
    return new


def with_changed_body(jaxpr: AnyJaxpr, change: Callable[[Jaxpr], Body]) -> AnyJaxpr:
    """Returns a jaxpr with another body; the same object if nothing changes."""
    old, _ = jaxprs.open_jaxpr(jaxpr)
    new = change(old)._asdict()
    if all(are_same(x, getattr(old, name)) for name, x in new.items()):
        return jaxpr
    return cast(AnyJaxpr, jaxprs.with_body(jaxpr, old.replace(**new)))
