"""Rewrites jaxprs and the jaxprs in their equations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax.extend import core

from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, PyTree, Value

J = TypeVar("J", bound=AnyJaxpr)


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
        # Dimension numbers of a convolution or a gather are NamedTuples.
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    return change(value, *others)


def map_jaxprs(params: Value, change: Callable[[Any], Value]) -> Value:
    """Applies a function to the jaxprs in parameters of an equation, see :func:`map_params`."""
    return map_params(params, lambda value: change(value) if jaxprs.is_jaxpr(value) else value)


def are_same(one: Collection[object], two: Collection[object]) -> bool:
    """Returns whether two sequences hold the same objects."""
    return len(one) == len(two) and all(map(operator.is_, one, two))


def with_equations(jaxpr: Jaxpr, equations: Sequence[Equation]) -> Jaxpr:
    """Replaces the equations of an open jaxpr; returns the jaxpr itself if they are the same."""
    return jaxpr if are_same(equations, jaxpr.eqns) else jaxpr.replace(eqns=[*equations])


class Rewriter:
    """Rewrites jaxprs, open or closed, and the jaxprs in their equations.

    A subclass has the rule, :meth:`equation`, which says what takes the place of one equation. Of a
    jaxpr in which nothing changes the result is the same object, and a jaxpr that several equations
    share stays shared.

    Example:
      >>> class Cosines(Rewriter):
      ...     def equation(self, eqn, jaxpr):
      ...         is_sine = eqn.primitive.name == "sin"
      ...         new = replaced(eqn, jax.numpy.cos, eqn.invars) if is_sine else None
      ...         return new or super().equation(eqn, jaxpr)
      >>> closed = jax.make_jaxpr(lambda x: jax.numpy.sin(x) * 2)(1.0)
      >>> [eqn.primitive.name for eqn in Cosines()(closed).eqns]
      ['cos', 'mul']
    """

    def __init__(self) -> None:
        # By identity; holds both, as ids are reused.
        self._known: dict[int, tuple[Any, Any]] = {}

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        """Returns what takes the place of an equation of ``jaxpr``: without a rule, the equation
        itself, with the jaxprs that it runs rewritten."""
        return [self.inside(eqn, names) if (names := jaxprs.programs(eqn)) else eqn]

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rewrites an open jaxpr; returns the jaxpr itself if nothing changes."""
        return with_equations(
            jaxpr, [new for eqn in jaxpr.eqns for new in self.equation(eqn, jaxpr)]
        )

    def __call__(self, jaxpr: J) -> J:
        """Rewrites a jaxpr, and keeps its constants."""
        if id(jaxpr) not in self._known:
            body, _ = jaxprs.open_jaxpr(jaxpr)
            new = self.body(body)
            self._known[id(jaxpr)] = jaxpr, jaxpr if new is body else jaxprs.with_body(jaxpr, new)
        return cast(J, self._known[id(jaxpr)][1])

    def inside(self, eqn: Equation, names: Iterable[str]) -> Equation:
        """Rewrites the jaxprs in these parameters of an equation."""
        params = {name: jaxprs.param(eqn, name) for name in names}
        new = map_jaxprs(params, self)
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


def renamed(
    equations: Iterable[Equation],
    names: Mapping[Atom, Atom],
    params: Callable[[Equation], dict[str, object]] = lambda eqn: {},
) -> Iterator[Equation]:
    """Yields equations with other variables.

    Args:
      equations: The equations.
      names: By variable, the one that takes its place; the others stay.
      params: The parameters of an equation that change with its variables.
    """

    def named(v: Atom) -> Atom:
        return v if isinstance(v, core.Literal) else names.get(v, v)

    for eqn in equations:
        yield eqn.replace(
            invars=[*map(named, eqn.invars)],
            outvars=[*map(named, eqn.outvars)],
            params=eqn.params | params(eqn),
        )


def traced(
    function: Callable[..., PyTree], operands: Sequence[Atom]
) -> tuple[Iterable[Equation], Sequence[Atom]]:
    """Traces a function; returns its equations, which take ``operands``, and its results."""
    closed = jax.make_jaxpr(function)(*(jaxprs.like(v.aval) for v in operands))
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    names = dict(zip(jaxpr.invars, operands, strict=True))
    return renamed(jaxpr.eqns, names), jaxpr.outvars


def replaced(
    eqn: Equation, function: Callable[..., PyTree], operands: Sequence[Atom]
) -> list[Equation]:
    """Returns the equations of a function of `operands`, which compute the result of `eqn`."""
    with jaxprs.traced_where(eqn):
        equations, results = traced(function, operands)
    return [*renamed(equations, dict(zip(results, eqn.outvars, strict=True)))]
