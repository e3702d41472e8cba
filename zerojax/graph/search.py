"""Equations at any depth of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jax.extend.core import primitives as prims

from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import MOVES_OR_ROUNDS
from zerojax.graph.regions import regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, HasEquations, Jaxpr


def everything(equation: Equation) -> bool:
    """Enters every equation."""
    return True


def runs_regions(equation: Equation) -> bool:
    """Enters calls, loops and conds; not a ``shard_map``, nor a kernel."""
    # Inside a shard_map, sizes are those of one device.
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
            # Ids are unique while the outermost program holds all of these.
            # JAX traces a function under jit once, so that all layers of a model may run one jaxpr.
            if id(body) not in seen:
                seen.add(id(body))
                yield from equations(body, enters, seen)


class Run(NamedTuple):
    """An equation that a program runs.

    Attributes:
      equation: The equation.
      program: The program that contains it, the whole one or one inside it.
      times: The number of runs, including the iterations of the loops around it.
      exact: False in a loop with an unknown number of iterations; such a loop counts once.
    """

    equation: Equation
    program: HasEquations
    times: int
    exact: bool


def needed_runs(program: HasEquations, times: int = 1, *, exact: bool = True) -> Iterator[Run]:
    """Yields the runs of the equations, at any depth, that the results of a program need, each
    before those inside it.

    Args:
      program: The program.
      times, exact: Those of the program itself, as in :class:`Run`.
    """
    # XLA removes the other equations.
    for equation in graph_of(program).backward_slice(program.outvars).equations:
        yield Run(equation, program, times, exact)
        loop, known = jaxprs.scan_parts(equation), equation.primitive is not prims.while_p
        for region in regions(equation):
            inside = times if loop is None else times * loop.length
            yield from needed_runs(region.jaxpr, inside, exact=exact and known)


def first_use(jaxpr: HasEquations, v: Atom) -> Equation | None:
    """Returns the first equation, at any depth, that does more with a value than to move or round
    it; None if there is none."""
    for use in graph_of(jaxpr).users(v):
        found = _first_beyond(jaxpr, *use)
        if found is not None:
            return found
    return None


def _first_beyond(jaxpr: HasEquations, equation: Equation, i: int) -> Equation | None:
    """Returns what :func:`first_use` returns for operand ``i`` of an equation."""
    if runs_regions(equation):
        return first_inside(equation, i)
    if equation.primitive.name not in MOVES_OR_ROUNDS:
        return equation
    return next(filter(None, (first_use(jaxpr, out) for out in equation.outvars)), None)


def first_inside(equation: Equation, i: int) -> Equation | None:
    """Returns what :func:`first_use` returns for operand ``i`` of a call, a loop or a choice, in
    the programs inside."""
    inside = ((region.jaxpr, region.argument(i)) for region in regions(equation))
    found = (first_use(body, x) for body, x in inside if x is not None)
    return next(filter(None, found), None)


def named(jaxpr: Jaxpr, *names: str) -> Iterator[Equation]:
    """Yields the equations of primitives with these names, at any depth."""
    return (equation for equation in equations(jaxpr) if equation.primitive.name in names)


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
