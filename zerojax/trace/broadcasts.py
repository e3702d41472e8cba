"""Broadcasts that a loop reads in each iteration, computed in the loop.

JAX computes what is the same in all iterations before the loop when it differentiates a scan. For a
mask that is broadcast to the shape of attention scores this takes the memory of the scores of one
layer, from the forward to the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import Graph, graph_of
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Computation, Rewriter, computing
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr


def with_broadcasts_in_loops(closed: AnyJaxpr) -> AnyJaxpr:
    """Returns a traced program in which scans take the operands of broadcasts in place of their
    results. The numbers are the same.

    Calls, loops and branches are entered. A program without such scans is returned unchanged.

    Args:
      closed: The program's jaxpr and its constants.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def function(x, xs):
      ...     ones = jnp.broadcast_to(x, (4, 8))
      ...     return jax.lax.scan(lambda c, x: (c + ones * x, None), jnp.zeros((4, 8)), xs)[0]
      >>> traced = with_broadcasts_in_loops(jax.make_jaxpr(function)(jnp.ones(8), jnp.ones(3)))
      >>> traced.eqns[-1].invars[0].aval.shape
      (8,)
    """
    return _Scans()(closed)


class _Scans(Rewriter):
    """Rewrites scans to broadcast the constants of their iterations themselves."""

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        if eqn.primitive is prims.scan_p:
            graph, (constants, *_) = graph_of(jaxpr), jaxprs.scan_parts(eqn).operands(eqn.invars)
            sources = {i: _broadcast(v, graph) for i, v in enumerate(constants)}
            found = {i: each for i, each in sources.items() if each is not None}
            eqn = computing(eqn, "jaxpr", found) if found else eqn
        return super().equation(eqn, jaxpr)


def _broadcast(v: Atom, graph: Graph) -> Computation | None:
    """Returns the broadcast of a smaller array that computes a value, in a call too."""
    eqn = graph.producer(v)
    if eqn is None:
        return None
    if eqn.primitive is prims.broadcast_in_dim_p:
        operand, *sizes = eqn.invars
        # Further operands are dynamic sizes; a broadcast of dimensions of size 1 saves no memory.
        is_larger = not sizes and v.aval.size > operand.aval.size
        return Computation([eqn], operand) if is_larger else None
    if not jaxprs.is_plain_call(eqn):
        return None
    body, _ = jaxprs.open_jaxpr(jaxprs.called_jaxpr(eqn))
    inner = graph_of(body)
    found = _broadcast(body.outvars[eqn.outvars.index(v)], inner)
    if found is None:
        return None
    # jnp.where casts a number before it broadcasts it, both in one call.
    while (
        before := inner.producer(found.operand)
    ) and before.primitive is prims.convert_element_type_p:
        found = Computation([before, *found.equations], before.invars[0])
    if isinstance(found.operand, core.Literal):
        return found
    arguments = dict(zip(body.invars, eqn.invars, strict=True))
    is_given = found.operand in arguments
    return found._replace(operand=arguments[found.operand]) if is_given else None
