"""A program for any number of rows, from its traces on two numbers of rows.

The traces differ where the number of rows enters: in sizes of dimensions, in other parameters of
equations, and in literals. There the symbolic program has a dimension of
:func:`jax.export.symbolic_shape`, or a variable in place of a literal. So a dimension has rows
because it grows with the batch, and not because it has as many elements as the batch has rows.

The user's function itself sees numbers, as under plain jit. Traced on a symbol it could not use
``len(x)``, numpy or a kernel, and ``if len(x) == 32`` would be False without an error.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.flat import Flat, Variable
from zerojax.accumulation.lines import where
from zerojax.graph.primitives import KERNELS
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, HasEquations, Jaxpr

_GROUPS = frozenset({"feature_group_count", "batch_group_count"})
"""Parameters that count rows where ``jax.vmap`` has turned each row into a group."""
_RULES = prims.custom_jvp_call_p, prims.custom_vjp_call_p
_Dimension: Any = type(jax.export.symbolic_shape("b")[0])

NewVariable = Callable[[Any, Sequence[Any]], Any]
"""Function from the abstract value of a variable, and a shape, to a variable of that shape."""


class Parts(NamedTuple):
    """The parts of a program, as in a jaxpr."""

    constvars: list[Atom]
    invars: list[Atom]
    eqns: list[Equation]
    outvars: list[Atom]


class UnevenError(Exception):
    """Error for a program that depends on the number of rows; the message says where.

    Attributes:
      remedy: What to write instead, if known.
    """

    remedy: str | None = None


class Rows:
    """The numbers of rows of two traces, and the sizes that they have in common.

    Args:
      one, two: The numbers of rows, both at least 2: jax traces another program where a dimension
        has a single element.
    """

    def __init__(self, one: int, two: int) -> None:
        self.traced = one, two
        self._unit = math.gcd(one, two)
        self._scope = jax.export.SymbolicScope()
        (self._symbol,) = jax.export.symbolic_shape("b", scope=self._scope)
        self._known: dict[Any, tuple[int, int]] = {}
        self._sizes: dict[tuple[int, int], Any] = {}

    @classmethod
    def of(cls, full: int, part: int) -> Rows:
        """Returns the rows to trace a batch of ``full`` rows with, and parts of it."""
        return cls(full, next(n for n in (part, 2, 3) if n > 1 and n != full))

    def size(self, one: int, two: int) -> Any:
        """Returns the size of a dimension that has these sizes in the traces: a multiple of a
        symbol if it grows in proportion to the rows."""
        if one == two:
            return one
        if (one, two) not in self._sizes:
            times, left = divmod(one * self._unit, self.traced[0])
            if left or not self.is_proportional(one, two):
                name = f"size{len(self._sizes)}"
                (new,) = jax.export.symbolic_shape(name, scope=self._scope)
            else:
                new = times * self._symbol
            self._sizes[one, two] = new
            self._known[new] = one, two
        return self._sizes[one, two]

    def is_proportional(self, one: int, two: int) -> bool:
        """Returns whether a dimension of these sizes grows in proportion to the rows."""
        return one * self.traced[1] == two * self.traced[0]

    def at(self, size: Any, rows: int) -> int:
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
        if exact.denominator != 1 or not self.is_proportional(one, two):
            raise UnevenError(f"a dimension has {one} elements for {self.traced[0]} rows")
        return exact.numerator

    def per_row(self, size: Any) -> Fraction | None:
        """Returns how many elements a symbolic size has for each row; None if it does not grow in
        proportion to the rows."""
        one, two = self._known[size]
        return Fraction(one, self.traced[0]) if self.is_proportional(one, two) else None

    def shape(self, atom: Atom, rows: int) -> tuple[int, ...]:
        """Returns the shape of a variable for a number of rows."""
        return tuple(self.at(n, rows) for n in atom.aval.shape)


def is_symbolic(value: object) -> bool:
    """Returns whether a size, or a parameter of an equation, is symbolic."""
    return isinstance(value, _Dimension)


def growing(atom: Atom) -> list[int]:
    """Returns the dimensions in which a value grows with the number of rows."""
    shape = getattr(atom.aval, "shape", ())
    return [d for d, n in enumerate(shape) if is_symbolic(n)]


def grows(eqn: Equation) -> bool:
    """Returns whether an operand or a result of an equation grows with the number of rows."""
    return any(map(growing, (*eqn.invars, *eqn.outvars)))


@dataclass(frozen=True, eq=False)
class Both:
    """A parameter of an equation that the traces do not have in common.

    Attributes:
      one, two: The values in the traces.
    """

    one: Any
    two: Any


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
    rows: Rows
    numbers: Mapping[Atom, tuple[Any, Any]]
    consts: tuple[Sequence[Any], Sequence[Any]]

    @classmethod
    def of(cls, one: Flat, two: Flat, rows: Rows) -> Symbolic:
        """Returns the program with these traces.

        Raises:
          UnevenError: The traces differ in more than numbers.
        """
        common = _Common(rows)
        parts = common.program(one, two, _flat_variable)
        flat = Flat(**parts._asdict(), consts=one.consts, bound=one.bound)
        return cls(flat, rows, common.numbers, (one.consts, two.consts))

    @property
    def global_rows(self) -> int:
        """The number of rows of the global batch."""
        return self.rows.traced[0]

    def on_all(self, program: Flat) -> Flat:
        """Returns a part of the program, on the global batch."""
        return _Instance(self, self.global_rows, frozenset()).flat(program)

    def on_some(self, program: Flat, rows: int, own: frozenset[Atom]) -> Flat:
        """Returns a part of the program, on some rows of the global batch.

        A mean over rows divides by their number. With the number of the global batch instead, some
        rows compute their share of its mean, so that the shares add up, and so do their gradients.

        Args:
          rows: The number of rows.
          own: The variables of :attr:`numbers`, and the first results of equations, that have the
            number of these rows and not that of the global batch.

        Raises:
          UnevenError: The program is not known for as many rows.
        """
        return _Instance(self, rows, own).flat(program)


def _flat_variable(aval: Any, shape: Sequence[Any]) -> Variable:
    return Variable(aval.update(shape=tuple(shape)))


def _same(one: Iterable[object], two: Iterable[object]) -> bool:
    return all(map(operator.is_, one, two))


def _mapped(value: Any, change: Callable[..., Any], *others: Any) -> Any:
    """Applies a function to a parameter, or to the entries of a tuple or dict and to those of
    ``others`` of the same form; returns the same object if nothing changes."""
    if isinstance(value, dict):
        new = {key: _mapped(x, change, *(o.get(key) for o in others)) for key, x in value.items()}
        return value if _same(new.values(), value.values()) else new
    if isinstance(value, tuple) and all(_is_alike(value, o) for o in others):
        entries = [_mapped(x, change, *rest) for x, *rest in zip(value, *others, strict=True)]
        if _same(entries, value):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    return change(value, *others)


def _is_alike(one: tuple[Any, ...], two: Any) -> bool:
    return type(one) is type(two) and len(one) == len(two)


def _with_parts(jaxpr: AnyJaxpr, change: Callable[[Jaxpr], Parts]) -> AnyJaxpr:
    """Returns a jaxpr with other parts; the same object if they are the same."""
    body, _ = jaxprs.open_jaxpr(jaxpr)
    parts = change(body)._asdict()
    if all(_same(new, getattr(body, name)) for name, new in parts.items()):
        return jaxpr
    return cast(AnyJaxpr, jaxprs.with_body(jaxpr, body.replace(**parts)))


class _Common:
    """The program of two traces.

    Attributes:
      numbers: See :class:`Symbolic`.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.numbers: dict[Atom, tuple[Any, Any]] = {}

    def program(self, one: HasEquations, two: HasEquations, new: NewVariable) -> Parts:
        """Returns the parts of the program.

        Raises:
          UnevenError: The traces differ in more than numbers.
        """
        env: dict[Atom, tuple[Atom, Atom]] = {}  # by variable of the first, that of the second too

        def variable(a: Atom, b: Atom, *, fresh: bool = False) -> Atom:
            shape = self._shape(a, b)
            v: Atom = new(a.aval, shape) if fresh or any(map(is_symbolic, shape)) else a
            env[a] = v, b
            return v

        def read(a: Atom, b: Atom) -> Atom:
            literals = isinstance(a, core.Literal), isinstance(b, core.Literal)
            if all(literals):
                return self._literal(a, b)
            if any(literals) or env[a][1] is not b:
                raise UnevenError
            return env[a][0]

        if len(one.constvars) != len(two.constvars):
            raise UnevenError("it has other constants")
        constvars = [*map(variable, one.constvars, two.constvars)]
        invars = [*map(variable, one.invars, two.invars)]
        eqns: list[Equation] = []
        for a, b in itertools.zip_longest(one.eqns, two.eqns):
            try:
                eqns.append(self._equation(a, b, read, variable))
            except UnevenError as e:
                raise UnevenError(str(e) or where(a or b)) from e
        try:
            outvars = [*map(read, one.outvars, two.outvars)]
        except UnevenError as e:
            raise UnevenError("it returns other values") from e
        return Parts(constvars, invars, eqns, outvars)

    def _equation(
        self,
        a: Equation | None,
        b: Equation | None,
        read: Callable[[Atom, Atom], Atom],
        variable: Callable[..., Atom],
    ) -> Equation:
        if a is None or b is None or a.primitive != b.primitive:
            raise UnevenError
        if len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            raise UnevenError
        if a.primitive.name in KERNELS:
            params = _mapped(a.params, _either, b.params)
        else:
            params = _mapped(a.params, self._param, b.params)
        if a.primitive in _RULES:  # its functions return what they return for the traced rows
            kept = [key for key, x in params.items() if not jaxprs.is_jaxpr(x)]
            params = {**params, **{key: _either(a.params[key], b.params[key]) for key in kept}}
        ins = [*map(read, a.invars, b.invars)]
        # Several equations may run the same program, but numbers of rows belong to one of them.
        apart = params is not a.params
        fresh = apart and not any(map(growing, ins))
        outs = [variable(x, y, fresh=fresh) for x, y in zip(a.outvars, b.outvars, strict=True)]
        if not apart and _same((*ins, *outs), (*a.invars, *a.outvars)):
            return a
        eqn = a.replace(invars=ins, outvars=outs, params=params)
        if grows(eqn):
            _check_numbers(eqn)
        return eqn

    def _shape(self, one: Atom, two: Atom) -> tuple[Any, ...]:
        """Returns the shape of a variable.

        Raises:
          UnevenError: The shapes are not those of one program.
        """
        a, b = (getattr(v.aval, "shape", ()) for v in (one, two))
        fit = len(a) == len(b) and all(
            (m and w % m == 0) or self._rows.is_proportional(w, m)
            for w, m in zip(a, b, strict=True)
        )
        if a != b and not fit:
            raise UnevenError
        return tuple(map(self._rows.size, a, b))

    def _literal(self, one: Any, two: Any) -> Atom:
        if one.val is two.val or not _differ(one.val, two.val):
            return one  # type: ignore[no-any-return]
        v = Variable(one.aval)
        self.numbers[v] = one, two
        return v

    def _param(self, one: Any, two: Any) -> Any:
        if jaxprs.is_jaxpr(one) and jaxprs.is_jaxpr(two):
            other = jaxprs.open_jaxpr(two)[0]
            return _with_parts(one, lambda body: self.program(body, other, jaxprs.new_variable))
        if isinstance(one, float) and _differ(one, two):
            return Both(one, two)
        sizes = isinstance(one, int | np.integer) and isinstance(two, int | np.integer)
        if not sizes or isinstance(one, bool) or one == two:
            return one
        return self._rows.size(int(one), int(two))


def _either(one: Any, two: Any) -> Any:
    """Returns a parameter of a kernel, or a function, that is traced for a number of rows."""
    same = one is two or (isinstance(one, int | str) and one == two)
    return one if same else Both(one, two)


def _differ(one: Any, two: Any) -> bool:
    return bool(np.any((one != two) & ((one == one) | (two == two))))


def _check_numbers(eqn: Equation) -> None:
    """Refuses an equation on rows whose parameters hold other numbers than sizes of dimensions that
    grow, such as an exponent or the column where a slice begins.

    Raises:
      UnevenError: Names the equation.
    """
    if eqn.primitive.name in KERNELS or jaxprs.programs(eqn):
        return
    grow = {d for v in (*eqn.invars, *eqn.outvars) for d in growing(v)}
    for name, value in eqn.params.items():
        if isinstance(value, tuple) and name != "sizes":  # a split's are of one dimension
            if any(_has_number(x) and d not in grow for d, x in enumerate(value)):
                raise UnevenError(where(eqn))
        elif name not in _GROUPS and name != "sizes" and _has_number(value):
            raise UnevenError(where(eqn))


def _has_number(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_number, value))
    return is_symbolic(value) or (isinstance(value, Both) and isinstance(value.one, float))


class _Instance:
    """Puts numbers of rows into a symbolic program."""

    def __init__(self, symbolic: Symbolic, rows: int, own: frozenset[Atom]) -> None:
        self._symbolic, self._rows, self._own = symbolic, rows, own
        self._rule: Equation | None = None  # around the equations, with derivatives of its own

    def flat(self, program: Flat) -> Flat:
        """Returns a program on these rows."""
        parts = self._program(program, self._rows, _flat_variable)
        first, second = self._symbolic.consts
        consts = [
            b if np.shape(a) != np.shape(b) and self._rows == self._symbolic.rows.traced[1] else a
            for a, b in zip(first, second, strict=True)
        ]
        return Flat(**parts._asdict(), consts=consts if parts.constvars else [])

    def _program(self, program: HasEquations, rows: int, new: NewVariable) -> Parts:
        env: dict[Atom, Atom] = {}

        def variable(v: Atom) -> Atom:
            if v not in env:
                shape = self._symbolic.rows.shape(v, rows) if growing(v) else None
                env[v] = v if shape is None else new(v.aval, shape)
            return env[v]

        def read(v: Atom) -> Atom:
            if isinstance(v, core.Literal):
                return v
            return self._number(v) if v in self._symbolic.numbers else variable(v)

        constvars, invars = ([*map(variable, x)] for x in (program.constvars, program.invars))
        eqns = [self._equation(eqn, rows, read, variable) for eqn in program.eqns]
        return Parts(constvars, invars, eqns, [*map(read, program.outvars)])

    def _equation(
        self, eqn: Equation, rows: int, read: Callable[[Atom], Atom], new: Callable[[Atom], Atom]
    ) -> Equation:
        # Where nothing grows, only the number of rows of the global batch gives its numbers.
        of_all = not grows(eqn) and not self._own.issuperset(eqn.outvars[:1])
        outer = self._rule
        self._rule = outer or (eqn if eqn.primitive in _RULES else None)
        ins, outs = [*map(read, eqn.invars)], [*map(new, eqn.outvars)]
        here = self._symbolic.global_rows if of_all else rows
        if eqn.primitive.name == "shard_map" and here not in self._symbolic.rows.traced:
            params = _on_one_device(eqn, ins)
        else:
            params = _mapped(eqn.params, lambda value: self._param(value, here))
        if of_all and params is not eqn.params:
            self._check_rule()
        self._rule = outer
        same = params is eqn.params and _same((*ins, *outs), (*eqn.invars, *eqn.outvars))
        return eqn if same else eqn.replace(invars=ins, outvars=outs, params=params)

    def _number(self, v: Atom) -> Atom:
        """Returns a literal in place of a number of rows."""
        one, two = self._symbolic.numbers[v]
        a, b = self._symbolic.rows.traced
        if v not in self._own:
            self._check_rule()
        if v not in self._own or self._rows == a:
            return one  # type: ignore[no-any-return]
        if self._rows == b:
            return two  # type: ignore[no-any-return]
        for power in (1.0, -1.0):  # a count, a weight
            if np.allclose(one.val * b**power, two.val * a**power):
                value = np.asarray(one.val * (self._rows / a) ** power, one.aval.dtype)
                return cast(Atom, core.Literal(value, one.aval))
        raise UnevenError(f"{one.val} for {a} rows is {two.val} for {b}, but for {self._rows}?")

    def _check_rule(self) -> None:
        """Refuses numbers of the global batch within a function with derivatives of its own, which
        are those of the rows that it was traced on.

        Raises:
          UnevenError: Names the function.
        """
        if self._rule is not None and self._rows != self._symbolic.global_rows:
            raise UnevenError(where(self._rule))

    def _param(self, value: Any, rows: int) -> Any:
        if jaxprs.is_jaxpr(value):
            return _with_parts(value, lambda body: self._program(body, rows, jaxprs.new_variable))
        if isinstance(value, Both):
            if rows not in self._symbolic.rows.traced:
                raise UnevenError(f"it is known for {self._symbolic.rows.traced} rows, not {rows}")
            return value.two if rows == self._symbolic.rows.traced[1] else value.one
        return self._symbolic.rows.at(value, rows) if is_symbolic(value) else value


def _on_one_device(eqn: Equation, operands: Sequence[Atom]) -> dict[str, Any]:
    """Returns the parameters of a ``shard_map`` whose operands have the rows of one device in the
    second trace.

    Raises:
      UnevenError: Its function is traced on other shapes.
    """
    params = {key: x.two if isinstance(x, Both) else x for key, x in eqn.params.items()}
    traced = [v.aval.shape for v in jaxprs.open_jaxpr(params["jaxpr"])[0].invars]
    if traced != [v.aval.shape for v in operands]:
        raise UnevenError(where(eqn))
    return params
