"""Target specs of gradients, traced back to the equations that compute them.

The step constrains each gradient to its shard when the optimizer takes it. That may be long after
it was computed: after a loop over layers, or after the sum of two uses of a tied parameter. Traced
back through the jaxpr, the constraint reaches the equations that compute the gradient, so that it
can be reduce-scattered there.

In this package ``want`` is the sequence of the target specs of a program's results, and ``wants``
maps the variables of a program to the specs that :func:`trace_back` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, NamedSharding

from zerojax.collectives import propagate
from zerojax.devices.mesh import zero_axis
from zerojax.graph.analysis import Analysis
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import BRANCHES, ELEMENTWISE, LABELS, OVERWRITES
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

    def of_operands(eqn: Equation, specs: Sequence[Spec | None]) -> Sequence[Spec | None]:
        spec = specs[0] if len(specs) == 1 else None
        if spec is None and marks.is_mark(eqn, marks.GRADIENT):
            spec = of_gradient(jaxpr, eqn.outvars[0], mesh)
        if spec is None:
            return [None] * len(eqn.invars)
        return _of_operands(eqn, spec, graph, mesh)

    places = {leaf: i for i, spec in enumerate(outs) for leaf in getattr(spec, "leaves", ())}

    def join(later: Spec | None, spec: Spec | None) -> Spec | None:
        """Returns the spec of the last use of a value that has one. The gradient is that of the
        first leaf among the results: moments come after parameters."""
        if later is None or spec is None:
            return spec if later is None else later
        leaves = (*getattr(later, "leaves", ()), *getattr(spec, "leaves", ()))
        first = sorted(leaves, key=lambda leaf: places.get(leaf, 0))[:1]
        return layout.LeafSpec(later, *first)

    analysis: Analysis[Spec | None] = Analysis(None, join, of_operands, enters=False)
    analysis.rule("scan")(_of_starts)
    returned = {
        v: spec
        for v, spec in zip(jaxpr.outvars, outs, strict=True)
        if spec is not None and not isinstance(v, core.Literal)
    }
    ends = [None if isinstance(v, core.Literal) else returned.get(v) for v in jaxpr.outvars]
    found = analysis.backward(jaxpr, ends).of
    marked = {v: of_gradient(jaxpr, v, mesh) for v in marks.gradients(jaxpr)}
    return marked | {v: spec for v, spec in found.items() if spec is not None}


def _of_operands(eqn: Equation, spec: Spec, graph: Graph, mesh: Mesh) -> list[Spec | None]:
    """Returns the target specs of the operands that supply the elements of an equation's result,
    from that of the result; None for other operands, such as the zeros that an entry is added
    to."""
    if eqn.primitive.name in _PASSES:
        shape = eqn.outvars[0].aval.shape
        return [spec if v.aval.shape == shape else None for v in eqn.invars]
    found = propagate.operand_specs(eqn, spec, mesh)
    specs = [None if graph.is_zeros(v) else found.get(i) for i, v in enumerate(eqn.invars)]
    return [None if each is None else layout.with_leaves(each, spec) for each in specs]


def of_gradient(jaxpr: HasEquations, v: Atom, mesh: Mesh) -> Spec:
    """Returns the spec of a marked gradient ``v``. The step's constraint directly follows the mark;
    a constraint without a mark is the user's, usually one of an activation."""
    graph = graph_of(jaxpr)
    uses = [use.equation for use in graph.users(v)]
    specs = [spec_of(use) for use in uses if use.primitive is prims.sharding_constraint_p]
    found = [layout.join_axes(x, zero_axis(mesh), mesh) for x in specs if x is not None]
    spec = found[0] if found else (None,) * v.aval.ndim
    return layout.LeafSpec(spec, marks.path_of(graph.producer(v)))


def is_reduced(
    jaxpr: HasEquations, v: Atom, spec: Spec, mesh: Mesh, by_rows: Callable[[Atom], bool]
) -> bool:
    """Returns whether :func:`trace_back` follows the constraint of a value to the equations at
    which its terms are reduced: not to an argument of the program, nor to a ``cond`` or ``while``.

    Args:
      jaxpr: An open jaxpr.
      v: One of its variables.
      spec: The target spec of ``v``.
      mesh: The mesh of all specs.
      by_rows: Whether a value depends on rows of the batch; other terms need no reduction.
    """
    graph = graph_of(jaxpr)
    eqn = graph.producer(v)
    if not by_rows(v):
        return True
    if eqn is None or eqn.primitive.name in BRANCHES:
        return False
    if eqn.primitive in jaxprs.CALLS:
        (inner,) = jaxprs.bodies(eqn)
        return is_reduced(inner, inner.outvars[eqn.outvars.index(v)], spec, mesh, by_rows)
    pairs = zip(eqn.invars, _of_operands(eqn, spec, graph, mesh), strict=True)
    return all(is_reduced(jaxpr, x, each, mesh, by_rows) for x, each in pairs if each is not None)


def passes(eqn: Equation, wants: Mapping[Atom, Spec], mesh: Mesh) -> bool:
    """Returns whether :func:`trace_back` follows the constraint through this equation."""
    if eqn.primitive.name in _PASSES or propagate.reversible(eqn):
        return True
    spec = wants.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
    return spec is not None and bool(propagate.operand_specs(eqn, spec, mesh))


def of_scan_body(loop: ScanParts, want: Sequence[Spec | None]) -> list[Spec | None]:
    """Returns the target specs of one iteration's results, from those of the scan's results."""
    carried, stacks = loop.results(want)
    entries = (None if s is None or s[0] else layout.with_leaves(s[1:], s) for s in stacks)
    return [*carried, *entries]


def _of_starts(eqn: Equation, specs: Sequence[Spec | None]) -> Sequence[Spec | None]:
    """Returns the target specs of a scan's operands: of the start values of its carry, from those
    of the final values."""
    loop = jaxprs.scan_parts(eqn)
    consts, _, stacks = loop.operands(eqn.invars)
    return [*[None] * len(consts), *loop.results(specs)[0], *[None] * len(stacks)]


def spec_of(eqn: Equation) -> Spec | None:
    """Returns the spec of a sharding constraint, without axes of size 1, like all specs in this
    package; None if its sharding is not a ``NamedSharding``."""
    sharding = jaxprs.param(eqn, "sharding")
    if not isinstance(sharding, NamedSharding):
        return None
    spec = layout.full(sharding.spec, eqn.outvars[0].aval.ndim)
    return layout.cutting(spec, sharding.mesh)
