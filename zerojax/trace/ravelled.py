"""Sums over all elements of an array, in the array's own shape.

``jnp.vdot`` reshapes its operands to vectors, and so do the dot products of optax and the norm of a
``ravel()``. Each device can multiply and add up its shards in any shape, but XLA gathers an array
to reshape it to a vector, unless the first dimension is the sharded one.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import primitives as prims

from zerojax.graph.contractions import Contraction
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import CONTRACTIONS, ELEMENTWISE, REDUCTIONS
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Computation, Rewriter, computing, renamed
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr
from zerojax.xla.unused import without_unused

_SUMS = CONTRACTIONS | REDUCTIONS - {"argmax", "argmin"}  # these return a position in the vector


def without_ravels(closed: AnyJaxpr) -> AnyJaxpr:
    """Returns a traced program in which dot products and reductions of reshaped arrays, and of
    values computed from these element by element, are those of the arrays themselves. Each sum
    keeps its terms, so only their order may change.

    Calls, loops and branches are entered. A program without such sums is returned unchanged.

    Args:
      closed: The program's jaxpr and its constants.
    """
    return _Sums()(closed)


class _Sums(Rewriter):
    """Rewrites sums, and removes the vectors that nothing else needs."""

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        new, graph = super().body(jaxpr), graph_of(jaxpr)

        def prune(eqn: Equation, used: Sequence[bool]) -> Equation | None:
            was_used = any(graph.times_used(v) for v in eqn.outvars)
            is_vector = was_used and (_is_ravel(eqn) or _is_by_element(eqn))
            return None if is_vector and not any(used) else eqn

        return jaxpr if new is jaxpr else without_unused(new, prune)

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        """Returns a sum over arrays in their own shape; a call takes arrays in this shape if it
        only sums over them."""
        if eqn.primitive.name in _SUMS and (new := _summed_in_shape(eqn, graph_of(jaxpr))):
            return new
        operands = eqn.invars if jaxprs.is_plain_call(eqn) else ()
        found = ((i, _ravel(v, graph_of(jaxpr))) for i, v in enumerate(operands))
        if ravels := {i: ravel for i, ravel in found if ravel is not None}:
            own = {i: Computation([ravel], ravel.invars[0]) for i, ravel in ravels.items()}
            call = computing(eqn, jaxprs.CALLS[eqn.primitive], own)
            call = self.inside(call, jaxprs.programs(eqn))
            (body,) = jaxprs.bodies(call)
            # A vector that the call needs anyway would only be computed inside it.
            if not any(map(_is_ravel, body.eqns)):
                return [call]
        return super().equation(eqn, jaxpr)


def _summed_in_shape(eqn: Equation, graph: Graph) -> Sequence[Equation]:
    """Returns a dot product or a reduction of values that are computed element by element from
    reshaped arrays of one shape as equations of the arrays themselves; none for other equations."""
    if eqn.outvars[0].aval.shape or any(v.aval.ndim != 1 for v in eqn.invars):
        return []

    part = graph.backward_slice(eqn.invars, lambda v: not v.aval.shape, _is_by_element)
    arrays = {v: r.invars[0] for v in part.ends if (r := _ravel(v, graph)) is not None}
    shapes = {x.aval.shape for x in arrays.values()}
    is_known = all(not v.aval.shape or v in arrays for v in part.ends)
    if len(shapes) != 1 or not is_known:
        return []
    (shape,) = shapes
    every = tuple(range(len(shape)))
    product = Contraction.of(eqn)
    sums = {"axes": every} if product is None else product.params((every, every), ((), ()))
    own = arrays | {v: jaxprs.new_variable(v.aval, shape) for v in part.results}
    new = renamed(
        part.equations, own, lambda each: {"shape": shape} if _spreads_scalar(each) else {}
    )
    return [*new, eqn.replace(invars=[own[v] for v in eqn.invars], params=eqn.params | sums)]


def _is_by_element(eqn: Equation) -> bool:
    """Returns whether an equation computes each element from the same elements of its operands,
    without a sharding of its result."""
    is_known = eqn.primitive.name in ELEMENTWISE or _spreads_scalar(eqn)
    return is_known and jaxprs.param(eqn, "sharding", None) is None


def _spreads_scalar(eqn: Equation) -> bool:
    return eqn.primitive is prims.broadcast_in_dim_p and not eqn.invars[0].aval.shape


def _ravel(v: Atom, graph: Graph) -> Equation | None:
    """Returns the equation that reshapes an array to a vector ``v``; None for other values."""
    eqn = graph.producer(v)
    return eqn if eqn is not None and _is_ravel(eqn) else None


def _is_ravel(eqn: Equation) -> bool:
    """Returns whether an equation reshapes an array to a vector of the same elements in order."""
    # With dimensions, lax.reshape transposes first, so that the elements change their order.
    is_reshape = eqn.primitive is prims.reshape_p and jaxprs.param(eqn, "dimensions") is None
    return is_reshape and eqn.outvars[0].aval.ndim == 1 < eqn.invars[0].aval.ndim
