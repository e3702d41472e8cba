"""Target specs of gradients, traced back to the equations that compute them.

The step constrains each gradient to its shard when the optimizer takes it. That may be long after
it was computed: after a loop over layers, or after the sum of two uses of a tied parameter. Traced
back through the jaxpr, the constraint reaches the equations that compute the gradient, so that it
can be reduce-scattered there.

In this package ``want`` is the sequence of the target specs of a program's results, and ``wants``
maps the variables of a program to the specs that :func:`trace_back` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, NamedSharding

from zerojax.collectives import propagate
from zerojax.devices.mesh import zero_axis
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE, LABELS, OVERWRITES
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import Atom, Equation, HasEquations

_PASSES = ELEMENTWISE | LABELS | OVERWRITES


def trace_back(jaxpr: HasEquations, outs: Sequence[Spec | None], mesh: Mesh) -> dict[Atom, Spec]:
    """Returns, by variable, the spec of the shard of each gradient, and of each value of which a
    gradient is computed.

    The spec of a gradient that stays unsharded is the user's spec of the parameter.

    Args:
      jaxpr: an open jaxpr.
      outs: the target spec of each of its results; None if there is none.
      mesh: the mesh of all specs.
    """
    graph = graph_of(jaxpr)
    wants = {
        v: spec
        for v, spec in zip(jaxpr.outvars, outs, strict=True)
        if spec is not None and not isinstance(v, core.Literal)
    }
    constrained: dict[Atom, Spec] = {}
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        if eqn.primitive is prims.sharding_constraint_p and (spec := spec_of(eqn)) is not None:
            constrained[eqn.invars[0]] = layout.join_axes(spec, zero_axis(mesh), mesh)
        if marks.is_mark(eqn, marks.GRADIENT):
            # The step's constraint directly follows the mark. A constraint without a mark is the
            # user's, usually one of an activation.
            out = eqn.outvars[0]
            wants.setdefault(out, constrained.get(out, (None,) * out.aval.ndim))
        if (loop := jaxprs.scan_parts(eqn)) is not None:
            (_, starts, _), (results, _) = loop.operands(eqn.invars), loop.results(eqn.outvars)
            for out, start in zip(results, starts, strict=True):
                if out in wants and not isinstance(start, core.Literal):
                    wants.setdefault(start, wants[out])
        if len(eqn.outvars) != 1 or eqn.outvars[0] not in wants:
            continue
        out = eqn.outvars[0]
        if name in _PASSES:
            for v in eqn.invars:
                if not isinstance(v, core.Literal) and v.aval.shape == out.aval.shape:
                    wants.setdefault(v, wants[out])
        else:
            for at, spec in propagate.operand_specs(eqn, wants[out], mesh).items():
                v = eqn.invars[at]
                if not isinstance(v, core.Literal) and not graph.is_zeros(v):
                    wants.setdefault(v, spec)
    return wants


def passes(eqn: Equation, wants: Mapping[Atom, Spec], mesh: Mesh) -> bool:
    """Returns whether :func:`trace_back` follows the constraint through this equation."""
    if eqn.primitive.name in _PASSES or propagate.reversible(eqn):
        return True
    spec = wants.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
    return spec is not None and bool(propagate.operand_specs(eqn, spec, mesh))


def of_scan_body(loop: ScanParts, want: Sequence[Spec | None]) -> list[Spec | None]:
    """Returns the target specs of one iteration's results, from those of the scan's results."""
    carried, stacks = loop.results(want)
    return [*carried, *(None if s is None or s[0] else s[1:] for s in stacks)]


def spec_of(eqn: Equation) -> Spec | None:
    """Returns the spec of a sharding constraint, without axes of size 1, like all specs in this
    package; None if its sharding is not a ``NamedSharding``."""
    sharding = jaxprs.param(eqn, "sharding")
    if not isinstance(sharding, NamedSharding):
        return None
    spec = layout.full(sharding.spec, eqn.outvars[0].aval.ndim)
    return layout.cutting(spec, sharding.mesh)
