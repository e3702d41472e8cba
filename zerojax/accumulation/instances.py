"""Symbolic programs on numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from jax.extend import core

from zerojax.accumulation.flat import Flat
from zerojax.accumulation.symbolic import (
    Body,
    Both,
    Symbolic,
    UnevenError,
    growing,
    grows,
    is_symbolic,
    map_equations,
    with_changed_body,
)
from zerojax.accumulation.traces import RULES
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import are_same, map_params
from zerojax.xla.types import Atom, Equation, HasEquations, Value

_Read = Callable[[Atom], Atom]
"""Function from an atom of the symbolic program to that of the instance."""


def global_instance(symbolic: Symbolic, program: Flat) -> Flat:
    """Returns a part of a symbolic program, on the global batch."""
    return _Instance(symbolic, symbolic.global_rows, frozenset()).flat(program)


def instance(symbolic: Symbolic, program: Flat, rows: int, own: frozenset[Atom]) -> Flat:
    """Returns a part of a symbolic program, on some rows of the global batch.

    A mean over rows divides by their number. With the number of the global batch instead, some rows
    compute their share of its mean, so that the shares add up, and so do their gradients.

    Args:
      symbolic: The program.
      program: Some of its equations.
      rows: The number of rows.
      own: The variables of ``symbolic.numbers``, and the first results of equations, that have the
        number of these rows in place of that of the global batch.

    Raises:
      UnevenError: The program is not known for as many rows.
    """
    return _Instance(symbolic, rows, own).flat(program)


class _Instance:
    """Puts numbers of rows into a symbolic program, see :func:`instance`."""

    def __init__(self, symbolic: Symbolic, rows: int, own: frozenset[Atom]) -> None:
        self._symbolic, self._rows, self._own = symbolic, rows, own
        self._traced = symbolic.rows.traced
        self._rule: Equation | None = None  # around the equations, with derivatives of its own

    def flat(self, program: Flat) -> Flat:
        """Returns a program on these rows."""
        body = self._program(program, self._rows)
        consts = [
            # A constant in the batch's size is known for the rows of both traces alone.
            b if np.shape(a) != np.shape(b) and self._rows == self._traced[1] else a
            for a, b in zip(*self._symbolic.consts, strict=True)
        ]
        return Flat(**body._asdict(), consts=consts if body.constvars else [])

    def _program(self, program: HasEquations, rows: int) -> Body:
        env: dict[Atom, Atom] = {}

        def variable(v: Atom) -> Atom:
            if v not in env:
                shape = self._symbolic.rows.shape(v, rows) if growing(v) else None
                env[v] = v if shape is None else jaxprs.new_variable(v.aval, shape)
            return env[v]

        def read(v: Atom) -> Atom:
            if isinstance(v, core.Literal):
                return v
            return self._number(v) if v in self._symbolic.numbers else variable(v)

        constvars, invars = ([*map(variable, x)] for x in (program.constvars, program.invars))
        eqns = map_equations(lambda eqn: self._equation(eqn, rows, read, variable), program)
        return Body(constvars, invars, eqns, [*map(read, program.outvars)])

    def _equation(self, eqn: Equation, rows: int, read: _Read, variable: _Read) -> Equation:
        # Where nothing grows, only the number of rows of the global batch gives its numbers.
        of_all = not grows(eqn) and not self._own.issuperset(eqn.outvars[:1])
        here = self._symbolic.global_rows if of_all else rows
        outer = self._rule
        self._rule = outer or (eqn if eqn.primitive in RULES else None)
        ins, outs = [*map(read, eqn.invars)], [*map(variable, eqn.outvars)]
        given = eqn.params
        if here not in self._traced:
            given = _on_few(eqn, ins)
        params = map_params(given, lambda value: self._param(value, here))
        if of_all and params is not eqn.params:
            self._check_rule()
        self._rule = outer
        if params is eqn.params and are_same((*ins, *outs), (*eqn.invars, *eqn.outvars)):
            return eqn
        return eqn.replace(invars=ins, outvars=outs, params=params)

    def _number(self, v: Atom) -> Atom:
        """Returns a literal in place of a number of rows."""
        one, two = self._symbolic.numbers[v]
        if v not in self._own:
            self._check_rule()
            return cast(Atom, one)
        if self._rows in self._traced:
            return cast(Atom, (one, two)[self._traced.index(self._rows)])
        a, b = self._traced
        # The number of rows enters a trace as a literal: as a divisor, as in jnp.mean, or inverse.
        for power in (1.0, -1.0):  # a count, a weight
            if np.allclose(one.val * b**power, two.val * a**power):
                value = np.asarray(one.val * (self._rows / a) ** power, one.aval.dtype)
                return cast(Atom, core.Literal(value, one.aval))
        raise UnevenError.with_contrast(
            f", whose number is {one.val:g} with {a} rows, {two.val:g} with {b}, and unknown "
            f"with {self._rows}"
        )

    def _check_rule(self) -> None:
        """Refuses numbers of the global batch within a function with derivatives of its own: these
        have the numbers of the rows that they were traced on.

        Raises:
          UnevenError: Names the function.
        """
        if self._rule is not None and self._rows != self._symbolic.global_rows:
            raise UnevenError().located(self._rule)

    def _param(self, value: Value, rows: int) -> Value:
        if jaxprs.is_jaxpr(value):
            return with_changed_body(value, lambda body: self._program(body, rows))
        if isinstance(value, Both):
            if rows not in self._traced:
                raise UnevenError.with_contrast(f", traced for {self._traced} rows, not for {rows}")
            return (value.one, value.two)[self._traced.index(rows)]
        return self._symbolic.rows.at(value, rows) if is_symbolic(value) else value


def _on_few(eqn: Equation, operands: Sequence[Atom]) -> dict[str, Value]:
    """Returns the parameters of an equation on rows of neither trace, as far as the second trace
    has them. Its ``shard_map`` runs on the rows of one device. Functions with derivatives of their
    own keep the rules of the second trace, which JAX refuses on shapes that they do not fit.

    Raises:
      UnevenError: The function of a ``shard_map`` is traced on other shapes.
    """
    if eqn.primitive.name != "shard_map" and eqn.primitive not in RULES:
        return eqn.params
    params = map_params(eqn.params, lambda x: x.two if isinstance(x, Both) else x)
    if eqn.primitive.name == "shard_map":
        traced = [v.aval.shape for v in jaxprs.open_jaxpr(params["jaxpr"])[0].invars]
        if traced != [v.aval.shape for v in operands]:
            raise UnevenError
    return cast("dict[str, Value]", params)
