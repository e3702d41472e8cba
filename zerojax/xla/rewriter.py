"""Rewrites jaxprs and the jaxprs in their equations."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr


class Rewriter(abc.ABC):
    """Rewrites jaxprs, open or closed. A jaxpr that several equations share stays shared."""

    def __init__(self) -> None:
        # By identity; holds both, as ids are reused.
        self._known: dict[int, tuple[Any, Any]] = {}

    @abc.abstractmethod
    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rewrites an open jaxpr; returns the jaxpr itself if nothing changes."""

    def __call__(self, jaxpr: Any) -> Any:
        """Rewrites a jaxpr, and keeps its constants."""
        if id(jaxpr) not in self._known:
            body, _ = jaxprs.open_jaxpr(jaxpr)
            new = self.body(body)
            self._known[id(jaxpr)] = jaxpr, jaxpr if new is body else jaxprs.with_body(jaxpr, new)
        return self._known[id(jaxpr)][1]

    def inside(self, eqn: Equation, names: Iterable[str]) -> Equation:
        """Rewrites the jaxprs in these parameters of an equation."""
        params = {name: self._value(jaxprs.param(eqn, name)) for name in names}
        is_new = any(new is not eqn.params[name] for name, new in params.items())
        return eqn.replace(params=eqn.params | params) if is_new else eqn

    def _value(self, value: object) -> object:
        if isinstance(value, tuple):
            new = tuple(map(self._value, value))
            is_new = any(a is not b for a, b in zip(new, value, strict=True))
            return new if is_new else value
        return self(value) if jaxprs.is_jaxpr(value) else value


class Computation(NamedTuple):
    """A computation of a value.

    Attributes:
      equations: Equations of one operand, of which each takes the result of the one before.
      operand: The operand of the first.
    """

    equations: Sequence[Equation]
    operand: Atom

    def between(self, argument: Atom, result: Atom) -> Iterator[Equation]:
        """Yields the equations with another operand and result."""
        for eqn in self.equations:
            is_last = eqn is self.equations[-1]
            out = result if is_last else jaxprs.new_variable(eqn.outvars[0].aval)
            yield eqn.replace(invars=[argument], outvars=[out])
            argument = out


def computing(eqn: Equation, name: str, found: Mapping[int, Computation]) -> Equation:
    """Returns an equation whose program computes some of its operands itself.

    Args:
      eqn: A call or a loop.
      name: The parameter with its program.
      found: By position, the computation of an operand.
    """
    program = jaxprs.param(eqn, name)
    body, _ = jaxprs.open_jaxpr(program)
    arguments = {i: jaxprs.new_variable(each.operand.aval) for i, each in found.items()}
    inside = [
        new for i, each in found.items() for new in each.between(arguments[i], body.invars[i])
    ]
    new = body.replace(
        invars=[arguments.get(i, v) for i, v in enumerate(body.invars)],
        eqns=[*inside, *body.eqns],
    )
    return eqn.replace(
        invars=[found[i].operand if i in found else v for i, v in enumerate(eqn.invars)],
        params=eqn.params | {name: jaxprs.with_body(program, new)},
    )


def replaced(
    eqn: Equation, function: Callable[..., jax.Array], operands: Sequence[Atom]
) -> list[Equation]:
    """Returns the equations of a function of `operands`, which compute the result of `eqn`."""
    with jaxprs.traced_where(eqn):
        closed = jax.make_jaxpr(function)(*(jaxprs.like(v.aval) for v in operands))
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    names: dict[Atom, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    names |= dict(zip(jaxpr.outvars, eqn.outvars, strict=True))

    def named(v: Atom) -> Atom:
        return v if isinstance(v, core.Literal) else names.get(v, v)

    return [
        each.replace(
            invars=[named(v) for v in each.invars], outvars=[named(v) for v in each.outvars]
        )
        for each in jaxpr.eqns
    ]
