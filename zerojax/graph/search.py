"""Equations at any depth of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax.extend import core

from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.regions import regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr


def everything(equation: Equation) -> bool:
    """Enters every equation."""
    return True


def runs_regions(equation: Equation) -> bool:
    """Enters calls, loops and conds; not a ``shard_map``, nor a kernel."""
    return bool(regions(equation)) and equation.primitive.name != "shard_map"


def equations(
    jaxpr: Jaxpr, enters: Callable[[Equation], bool] = everything, _seen: set[int] | None = None
) -> Iterator[Equation]:
    """Yields the equations of an open jaxpr and of the programs inside them, outer ones first.

    A program that several equations run is visited once.

    Args:
      jaxpr: An open jaxpr.
      enters: Whether the programs inside an equation are visited.
    """
    seen = set() if _seen is None else _seen
    for equation in jaxpr.eqns:
        yield equation
        for body in jaxprs.inner(equation) if enters(equation) else ():
            if id(body) not in seen:
                seen.add(id(body))
                yield from equations(body, enters, seen)


def named(jaxpr: Jaxpr, *names: str) -> Iterator[Equation]:
    """Yields the equations of primitives with these names, at any depth."""
    return (equation for equation in equations(jaxpr) if equation.primitive.name in names)


def literals(jaxpr: Jaxpr) -> Iterator[Atom]:
    """Yields the literals that equations take, at any depth."""
    operands = (v for equation in equations(jaxpr) for v in equation.invars)
    return (v for v in operands if isinstance(v, core.Literal))


def contains(
    equation: Equation,
    test: Callable[..., bool],
    *question: object,
    enters: Callable[[Equation], bool] = everything,
) -> bool:
    """Returns whether ``test(equation, *question)`` holds for an equation, or for one inside it.

    Each program inside is searched once, whatever runs it.

    Args:
      equation: The equation.
      test: A module-level function, so that answers can be cached.
      question: Further arguments of ``test``, hashable.
      enters: Whether the programs inside an equation are searched; also a module-level function.
    """
    if test(equation, *question):
        return True
    return enters(equation) and any(
        holds(body, test, enters, *question) for body in jaxprs.inner(equation)
    )


@cached_by_jaxpr
def holds(
    jaxpr: Jaxpr, test: Callable[..., bool], enters: Callable[[Equation], bool], *question: object
) -> bool:
    """Returns whether ``test`` holds for an equation of a program, see :func:`contains`."""
    return any(contains(equation, test, *question, enters=enters) for equation in jaxpr.eqns)
