"""Rewrites jaxprs and the jaxprs in their equations."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr, Value


def map_params(value: Value, change: Callable[..., Value], *others: Value) -> Value:
    """Applies a function to parameters of an equation, or to the entries of tuples, and to those of
    ``others``; returns the same object if nothing changes."""
    if isinstance(value, dict):
        new = {k: map_params(x, change, *(o.get(k) for o in others)) for k, x in value.items()}
        return value if are_same(new.values(), value.values()) else new
    alike = (type(o) is type(value) and len(o) == len(value) for o in others)
    if isinstance(value, tuple) and all(alike):
        entries = [map_params(x, change, *rest) for x, *rest in zip(value, *others, strict=True)]
        if are_same(entries, value):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    return change(value, *others)


def are_same(one: Iterable[object], two: Iterable[object]) -> bool:
    """Returns whether two sequences hold the same objects."""
    return all(map(operator.is_, one, two))


def with_equations(jaxpr: Jaxpr, equations: Sequence[Equation]) -> Jaxpr:
    """Replaces the equations of an open jaxpr; returns the jaxpr itself if they are the same."""
    unchanged = len(equations) == len(jaxpr.eqns) and are_same(equations, jaxpr.eqns)
    return jaxpr if unchanged else jaxpr.replace(eqns=[*equations])


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
        params = {name: jaxprs.param(eqn, name) for name in names}
        new = map_params(params, lambda value: self(value) if jaxprs.is_jaxpr(value) else value)
        return eqn if new is params else eqn.replace(params=eqn.params | new)


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
