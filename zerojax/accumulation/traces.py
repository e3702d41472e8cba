"""A symbolic program from a function's traces on two numbers of rows.

The traces differ where the number of rows enters: in sizes of dimensions, in other parameters of
equations, and in literals. There the symbolic program has symbolic sizes, and variables in place of
literals. The user's function itself sees numbers, as under plain jit: traced on a symbol it could
not use ``len(x)``, numpy or a kernel, and ``if len(x) == 32`` would be False without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.flat import Flat
from zerojax.accumulation.symbolic import (
    Body,
    Both,
    Size,
    Symbolic,
    TracedRows,
    UnevenError,
    growing,
    grows,
    is_symbolic,
    map_equations,
    with_changed_body,
)
from zerojax.graph.primitives import KERNELS
from zerojax.xla import jaxprs
from zerojax.xla.lines import where
from zerojax.xla.rewriter import are_same, map_params
from zerojax.xla.types import Atom, Equation, HasEquations, Value

RULES = prims.custom_jvp_call_p, prims.custom_vjp_call_p
"""Calls of functions with derivatives of their own."""
_GROUPS = frozenset({"feature_group_count", "batch_group_count"})
"""Parameters that count rows where ``jax.vmap`` has turned each row into a group."""

_Atoms = Callable[[Atom, Atom], Atom]
"""Function from atoms of both traces to that of the symbolic program."""


def symbolic_program(one: Flat, two: Flat, rows: TracedRows) -> Symbolic:
    """Returns the program that two traces have in common.

    Args:
      one, two: The traces.
      rows: The numbers of rows of the traces.

    Raises:
      UnevenError: The traces differ in more than numbers.
    """
    common = _Common(rows)
    body = common.program(one, two)
    flat = Flat(**body._asdict(), consts=one.consts, bound=one.bound)
    return Symbolic(flat, rows, common.numbers, (one.consts, two.consts))


class _Common:
    """The program that two traces have in common.

    Attributes:
      numbers: See :class:`Symbolic`.
    """

    def __init__(self, rows: TracedRows) -> None:
        self._rows = rows
        self.numbers: dict[Atom, tuple[Value, Value]] = {}

    def program(self, one: HasEquations, two: HasEquations) -> Body:
        """Returns the body of the program."""
        env: dict[Atom, tuple[Atom, Atom]] = {}  # by variable of the first, and that of the second

        def variable(a: Atom, b: Atom, *, fresh: bool = False) -> Atom:
            shape = self._shape(a, b)
            is_new = fresh or any(map(is_symbolic, shape))
            v = jaxprs.new_variable(a.aval, shape) if is_new else a
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
        constvars, invars = (
            [*map(variable, getattr(one, x), getattr(two, x))] for x in ("constvars", "invars")
        )
        eqns = map_equations(lambda a, b: self._equation(a, b, read, variable), one, two)
        try:
            outvars = [*map(read, one.outvars, two.outvars)]
        except UnevenError as e:
            raise UnevenError("it returns other values") from e
        return Body(constvars, invars, eqns, outvars)

    def _equation(
        self, a: Equation | None, b: Equation | None, read: _Atoms, variable: Callable[..., Atom]
    ) -> Equation:
        """Returns an equation; one of the traces may have none in its place."""
        if a is None or b is None:
            raise UnevenError
        if a.primitive != b.primitive:
            raise self._uneven("", where(b))
        if len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            raise UnevenError
        params = map_params(
            a.params, _either if a.primitive.name in KERNELS else self._param, b.params
        )
        if a.primitive in RULES:
            kept = [key for key, x in params.items() if not jaxprs.is_jaxpr(x)]
            params = params | {key: _either(a.params[key], b.params[key]) for key in kept}
        ins = [*map(read, a.invars, b.invars)]
        # Several equations may run the same program, but numbers of rows belong to one of them.
        apart = params is not a.params
        fresh = apart and not any(map(growing, ins))
        outs = [variable(x, y, fresh=fresh) for x, y in zip(a.outvars, b.outvars, strict=True)]
        if not apart and are_same((*ins, *outs), (*a.invars, *a.outvars)):
            return a
        eqn = a.replace(invars=ins, outvars=outs, params=params)
        if grows(eqn):
            self._check_numbers(eqn, b)
        return eqn

    def _shape(self, one: Atom, two: Atom) -> Sequence[Size]:
        """Returns the shape of a variable."""
        a, b = (getattr(v.aval, "shape", ()) for v in (one, two))
        if a != b and (len(a) != len(b) or not all(map(self._rows.fit, a, b))):
            raise self._uneven(f" of shape {a}", f"{b}")
        return [*map(self._rows.size, a, b)]

    def _uneven(self, one: str, two: str) -> UnevenError:
        """Returns an error that says how the traces differ."""
        n, m = self._rows.traced
        return UnevenError.with_contrast(f"{one} with {n} rows, and {two} with {m}")

    def _check_numbers(self, eqn: Equation, other: Equation) -> None:
        """Refuses an equation on rows whose parameters hold other numbers than sizes of dimensions
        that grow, such as an exponent or the column where a slice begins; ``other`` is that of the
        second trace."""
        if eqn.primitive.name in KERNELS or jaxprs.programs(eqn):
            return
        grow = {d for v in (*eqn.invars, *eqn.outvars) for d in growing(v)}
        for name, value in eqn.params.items():
            if isinstance(value, tuple):
                numbers = (_has_number(x) and d not in grow for d, x in enumerate(value))
                bad = name != "sizes" and any(numbers)  # a split's are of one dimension
            else:
                bad = name not in _GROUPS and _has_number(value)
            if bad:
                of_first = map_params(value, lambda x: self._rows.at(x, self._rows.traced[0]))
                raise self._uneven(f", whose {name} is {of_first}", f"{other.params[name]}")

    def _literal(self, one: Value, two: Value) -> Atom:
        if one.val is two.val or not _differ(one.val, two.val):
            literal: Atom = one
            return literal
        v = jaxprs.new_variable(one.aval)
        self.numbers[v] = one, two
        return v

    def _param(self, one: Value, two: Value) -> Value:
        if jaxprs.is_jaxpr(one) and jaxprs.is_jaxpr(two):
            other = jaxprs.open_jaxpr(two)[0]
            return with_changed_body(one, lambda body: self.program(body, other))
        if isinstance(one, float) and _differ(one, two):
            return Both(one, two)
        sizes = (isinstance(x, int | np.integer) and not isinstance(x, bool) for x in (one, two))
        return self._rows.size(int(one), int(two)) if all(sizes) and one != two else one


def _either(one: Value, two: Value) -> Value:
    """Returns a parameter of a kernel, or a function, that is traced for a number of rows."""
    same = one is two or (isinstance(one, int | str) and one == two)
    return one if same else Both(one, two)


def _differ(one: Value, two: Value) -> bool:
    """Returns whether two numbers differ; NaN is one number."""
    return bool(np.any((one != two) & ((one == one) | (two == two))))


def _has_number(value: Value) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_number, value))
    return is_symbolic(value) or (isinstance(value, Both) and isinstance(value.one, float))
