"""Sums over all elements of an array, in the array's own shape.

``jnp.vdot`` reshapes its operands to vectors, and so do the dot products of optax. Each device can
multiply and add up its shards in any shape, but XLA gathers an array to reshape it to a vector,
unless the first dimension is the sharded one.
"""

from __future__ import annotations

from jax.extend.core import primitives as prims

from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import REDUCTIONS
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr

_REDUCTIONS = REDUCTIONS - {"argmax", "argmin"}  # these return a position in the vector


def without_ravels(closed: AnyJaxpr) -> AnyJaxpr:
    """Returns a traced program in which dot products and reductions of reshaped arrays are those of
    the arrays themselves. Each sum keeps its terms, so only their order may change.

    Calls, loops and branches are entered. A program without such sums is returned unchanged.

    Args:
      closed: The program's jaxpr and its constants.
    """
    return _Programs()(closed)


class _Programs:
    """Rewrites jaxprs. A jaxpr that several equations share stays shared."""

    def __init__(self) -> None:
        # By identity; holds both, as ids are reused.
        self._known: dict[int, tuple[AnyJaxpr, AnyJaxpr]] = {}

    def __call__(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        if id(jaxpr) not in self._known:
            body, _ = jaxprs.open_jaxpr(jaxpr)
            new = self._body(body)
            self._known[id(jaxpr)] = jaxpr, jaxpr if new is body else jaxprs.with_body(jaxpr, new)
        return self._known[id(jaxpr)][1]

    def _body(self, jaxpr: Jaxpr) -> Jaxpr:
        graph = graph_of(jaxpr)
        equations = [_summed_in_shape(eqn, graph) or self._entered(eqn) for eqn in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
            return jaxpr
        used = {v for eqn in equations for v in jaxprs.variables(eqn.invars)}
        used.update(jaxprs.variables(jaxpr.outvars))
        kept = [eqn for eqn in equations if not _is_ravel(eqn) or eqn.outvars[0] in used]
        return jaxpr.replace(eqns=kept)

    def _entered(self, eqn: Equation) -> Equation:
        """Rewrites the programs of a call, a loop or a cond."""
        params = {}
        for name in jaxprs.programs(eqn):
            old = jaxprs.param(eqn, name)
            olds = old if isinstance(old, tuple) else (old,)
            news = tuple(map(self, olds))
            if any(new is not each for new, each in zip(news, olds, strict=True)):
                params[name] = news if isinstance(old, tuple) else news[0]
        return eqn.replace(params=eqn.params | params) if params else eqn


def _summed_in_shape(eqn: Equation, graph: Graph) -> Equation | None:
    """Returns a dot product of two reshaped arrays of one shape, or the reduction of a reshaped
    array, as that of the arrays themselves; None for other equations."""
    if eqn.primitive is not prims.dot_general_p and eqn.primitive.name not in _REDUCTIONS:
        return None
    arrays = [x for x in (_before_ravel(v, graph) for v in eqn.invars) if x is not None]
    is_same_shape = len({x.aval.shape for x in arrays}) == 1
    if len(arrays) < len(eqn.invars) or not is_same_shape or eqn.outvars[0].aval.shape:
        return None
    every = tuple(range(arrays[0].aval.ndim))
    is_product = eqn.primitive is prims.dot_general_p
    sums = {"dimension_numbers": ((every, every), ((), ()))} if is_product else {"axes": every}
    return eqn.replace(invars=arrays, params=eqn.params | sums)


def _before_ravel(v: Atom, graph: Graph) -> Atom | None:
    """Returns the array that is reshaped to a vector ``v``; None for other values."""
    eqn = graph.producer(v)
    return eqn.invars[0] if eqn is not None and _is_ravel(eqn) else None


def _is_ravel(eqn: Equation) -> bool:
    """Returns whether an equation reshapes an array to a vector of the same elements in order."""
    is_reshape = eqn.primitive is prims.reshape_p and jaxprs.param(eqn, "dimensions") is None
    return is_reshape and eqn.outvars[0].aval.ndim == 1 < eqn.invars[0].aval.ndim
