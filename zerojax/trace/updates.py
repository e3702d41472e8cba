"""Gradients of a step whose optimizer has no marks, found by the step's dataflow.

Differentiation names the equations that it creates. Results of these equations from which the new
state is computed are the gradients that the update consumes. A step whose optimizer zerojax wraps
has marks, see :mod:`zerojax.trace.marks`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax.numpy as jnp
from jax.extend import core

from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import ELEMENTWISE
from zerojax.graph.search import contains
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr


def find_gradients(jaxpr: Jaxpr, state: Sequence[int]) -> list[Atom]:
    """Returns the gradients from which a step computes its new state; none if they are uncertain.

    They are certain if each gradient belongs to one parameter, and all belong to one update: each
    array of the state is computed, element by element, from at most one gradient, each gradient
    that the new state depends on reaches a parameter, and no backward pass reads updated values. So
    gradients that the step adds up, an update in a loop, and gradients of single rows are not
    found.

    Args:
      jaxpr: The step, an open jaxpr.
      state: Positions of the state's arrays, among the arguments and among the results alike.
    """
    graph = graph_of(jaxpr)
    new = {jaxpr.invars[i]: jaxpr.outvars[i] for i in state}
    gradients = _from_backward(new.values(), graph)
    params = _differentiated(jaxpr, new.keys()) if gradients else set()
    if not gradients or len(gradients) > len(params):
        return []
    reached = [origins(v, gradients, graph) for v in new.values()]
    used_gradients = _from_backward([new[v] for v in params], graph)
    certain = (
        all(len(found) < 2 for found in reached)
        and set().union(*reached) == {*gradients}
        and {*used_gradients} == {*gradients}
        and not _backward_reads_updates(gradients, jaxpr)
        and all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in gradients)
    )
    return gradients if certain else []


def origins(v: Atom, variables: Collection[Atom], graph: Graph) -> set[Atom]:
    """Returns those of ``variables`` from which ``v`` is computed element by element, through
    values of the same shape; on each path the one nearest to ``v``."""
    left, seen, found = [v], set[Atom](), set[Atom]()
    while left:
        v = left.pop()
        if isinstance(v, core.Literal) or v in seen:
            continue
        seen.add(v)
        if v in variables:
            found.add(v)
        elif (eqn := graph.producer(v)) is not None:
            left += _operands(eqn, v)
    return found


def _operands(eqn: Equation, v: Atom) -> list[Atom]:
    """Returns the operands of an equation from which a result is computed element by element."""
    if eqn.primitive.name in ELEMENTWISE:
        return [x for x in eqn.invars if x.aval.shape == v.aval.shape]
    if eqn.primitive not in jaxprs.CALLS:
        return []
    (body,) = jaxprs.bodies(eqn)
    inside = origins(body.outvars[eqn.outvars.index(v)], {*body.invars}, graph_of(body))
    return [x for x, inner in zip(eqn.invars, body.invars, strict=True) if inner in inside]


def _from_backward(values: Collection[Atom], graph: Graph) -> list[Atom]:
    """Returns the results of the backward pass from which values are computed by equations outside
    any backward pass; none if such an equation has a backward pass inside."""
    left, seen, found = [*values], set[Atom](), list[Atom]()
    while left:
        v = left.pop()
        if isinstance(v, core.Literal) or v in seen:
            continue
        seen.add(v)
        if (eqn := graph.producer(v)) is None:
            continue
        if jaxprs.is_transposed(eqn):
            found.append(v)
        elif contains(eqn, jaxprs.is_transposed):
            return []
        else:
            left += eqn.invars
    return found


def _backward_reads_updates(gradients: Collection[Atom], jaxpr: Jaxpr) -> bool:
    """Returns whether a backward pass reads values that an update has computed from gradients."""
    updated = set[Atom]()
    for eqn in jaxpr.eqns:
        if jaxprs.is_transposed(eqn):
            if not updated.isdisjoint(jaxprs.variables(eqn.invars)):
                return True
        elif any(v in updated or v in gradients for v in jaxprs.variables(eqn.invars)):
            updated.update(eqn.outvars)
    return False


def _differentiated(jaxpr: Jaxpr, arguments: Collection[Atom]) -> set[Atom]:
    """Returns the arguments from which differentiated values are computed element by element."""
    graph, found = graph_of(jaxpr), set[Atom]()
    for eqn in filter(jaxprs.is_differentiated, jaxpr.eqns):
        for v in jaxprs.variables(eqn.invars):
            producer = graph.producer(v)
            if producer is None or not jaxprs.is_differentiated(producer):
                found |= origins(v, arguments, graph)
    return found
