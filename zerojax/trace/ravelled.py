"""Sums over all elements of an array, in the array's own shape.

``jnp.vdot`` reshapes its operands to vectors, and so do the dot products of optax and the norm of a
``ravel()``. Each device can multiply and add up its shards in any shape, but XLA gathers an array
to reshape it to a vector, unless the first dimension is the sharded one.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import ELEMENTWISE, REDUCTIONS
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Computation, Rewriter, computing
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr

_REDUCTIONS = REDUCTIONS - {"argmax", "argmin"}  # these return a position in the vector


def without_ravels(closed: AnyJaxpr) -> AnyJaxpr:
    """Returns a traced program in which dot products and reductions of reshaped arrays, and of
    values computed from these element by element, are those of the arrays themselves. Each sum
    keeps its terms, so only their order may change.

    Calls, loops and branches are entered. A program without such sums is returned unchanged.

    Args:
      closed: The program's jaxpr and its constants.
    """
    rewritten: AnyJaxpr = _Programs()(closed)
    return rewritten


class _Programs(Rewriter):
    """Rewrites the programs of calls, loops and branches."""

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        graph = graph_of(jaxpr)
        equations = [new for eqn in jaxpr.eqns for new in self._rewritten(eqn, graph)]
        if all(a is b for a, b in zip(equations, jaxpr.eqns, strict=False)):
            return jaxpr
        used, kept = {*jaxprs.variables(jaxpr.outvars)}, []
        for eqn in reversed(equations):
            was_used = any(graph.times_used(v) for v in eqn.outvars)
            is_vector = was_used and (_is_ravel(eqn) or _is_by_element(eqn))
            if not is_vector or not used.isdisjoint(eqn.outvars):
                kept.append(eqn)
                used.update(jaxprs.variables(eqn.invars))
        return jaxpr.replace(eqns=kept[::-1])

    def _rewritten(self, eqn: Equation, graph: Graph) -> Sequence[Equation]:
        return _summed_in_shape(eqn, graph) or [self._without_vectors(eqn, graph)]

    def _without_vectors(self, eqn: Equation, graph: Graph) -> Equation:
        """Rewrites the programs of an equation; a call takes arrays in their own shape if it only
        sums over them."""
        ravels = {i: r for i, v in enumerate(eqn.invars) if (r := _ravel(v, graph)) is not None}
        if ravels and jaxprs.is_plain_call(eqn):
            own = {i: Computation([ravel], ravel.invars[0]) for i, ravel in ravels.items()}
            call = computing(eqn, jaxprs.CALLS[eqn.primitive], own)
            call = self.inside(call, jaxprs.programs(eqn))
            (body,) = jaxprs.bodies(call)
            if not any(map(_is_ravel, body.eqns)):
                return call
        return self.inside(eqn, jaxprs.programs(eqn))


def _summed_in_shape(eqn: Equation, graph: Graph) -> Sequence[Equation]:
    """Returns a dot product or a reduction of values that are computed element by element from
    reshaped arrays of one shape as equations of the arrays themselves; none for other equations."""
    is_product = eqn.primitive is prims.dot_general_p
    is_sum = is_product or eqn.primitive.name in _REDUCTIONS
    if not is_sum or eqn.outvars[0].aval.shape or any(v.aval.ndim != 1 for v in eqn.invars):
        return []

    def is_given(v: Atom) -> bool:
        producer = graph.producer(v)
        return not v.aval.shape or producer is None or not _is_by_element(producer)

    equations, ends = graph.backward_slice(eqn.invars, is_given)
    arrays = {v: r.invars[0] for v in ends if (r := _ravel(v, graph)) is not None}
    shapes = {x.aval.shape for x in arrays.values()}
    is_known = all(not v.aval.shape or v in arrays for v in ends)
    if len(shapes) != 1 or not is_known:
        return []
    (shape,) = shapes
    every = tuple(range(len(shape)))
    sums = {"dimension_numbers": ((every, every), ((), ()))} if is_product else {"axes": every}
    own: dict[Atom, Atom] = dict(arrays)
    new = []
    for each in equations:
        (v,) = each.outvars
        operands = [x if isinstance(x, core.Literal) else own.get(x, x) for x in each.invars]
        own[v] = jaxprs.new_variable(v.aval, shape)
        params = each.params | ({"shape": shape} if _spreads_scalar(each) else {})
        new.append(each.replace(invars=operands, outvars=[own[v]], params=params))
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
    is_reshape = eqn.primitive is prims.reshape_p and jaxprs.param(eqn, "dimensions") is None
    return is_reshape and eqn.outvars[0].aval.ndim == 1 < eqn.invars[0].aval.ndim
