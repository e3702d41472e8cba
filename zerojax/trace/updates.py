"""Gradients of a step whose optimizer has no marks, found by the step's dataflow.

Differentiation names the equations that it creates. Results of these equations from which the new
state is computed are the gradients that the update consumes. A step whose optimizer zerojax wraps
has marks, see :mod:`zerojax.trace.marks`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax.numpy as jnp

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
    params = _differentiated(new.keys(), graph) if gradients else set()
    if not gradients or len(gradients) > len(params):
        return []
    reached = [origins(v, gradients, graph) for v in new.values()]
    used_gradients = _from_backward([new[v] for v in params], graph)
    certain = (
        all(len(found) < 2 for found in reached)
        and set().union(*reached) == {*gradients}
        and {*used_gradients} == {*gradients}
        # A critic that reads the new generator: two updates have no one norm.
        and not _backward_reads_updates(gradients, graph)
        and all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in gradients)
    )
    return gradients if certain else []


def origins(v: Atom, variables: Collection[Atom], graph: Graph) -> set[Atom]:
    """Returns those of ``variables`` from which ``v`` is computed element by element, through
    values of the same shape; on each path the one nearest to ``v``."""
    ends = graph.backward_slice([v], variables.__contains__, operands=_operands).ends
    return {*ends}.intersection(variables)


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
    outside = graph.backward_slice(values, through=_is_outside_backward)
    if any(map(_has_backward, outside.equations)):
        return []
    return [v for v in outside.ends if graph.producer(v) is not None]


def _is_outside_backward(eqn: Equation) -> bool:
    return not jaxprs.is_transposed(eqn)


def _has_backward(eqn: Equation) -> bool:
    return contains(eqn, jaxprs.is_transposed)


def _backward_reads_updates(gradients: Collection[Atom], graph: Graph) -> bool:
    """Returns whether a backward pass reads values that an update has computed from gradients."""
    read = graph.inputs(jaxprs.is_transposed)
    updates = graph.backward_slice(read, through=_is_outside_backward)
    return not {*gradients}.isdisjoint(updates.ends)


def _differentiated(arguments: Collection[Atom], graph: Graph) -> set[Atom]:
    """Returns the arguments from which differentiated values are computed element by element."""
    read = graph.inputs(jaxprs.is_differentiated)
    return set[Atom]().union(*(origins(v, arguments, graph) for v in read))
