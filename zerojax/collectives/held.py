"""The constants that every iteration of a loop needs unsharded, to be gathered before the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import propagate
from zerojax.collectives.shard import Shard
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import LABELS, LINEAR
from zerojax.graph.reach import DEPENDS
from zerojax.graph.regions import Region, regions
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr

MOST = 1_000_000_000
"""The most elements of parameters, and of their gradients, that one loop holds unsharded:
DeepSpeed's default of ``stage3_max_live_parameters``."""

SAME_ELEMENTS = LABELS | LINEAR | {"transpose"}


def decide(jaxpr: AnyJaxpr, consts: Sequence[object], mesh: Mesh, most: int = MOST) -> set[int]:
    """Returns the positions of a loop's constants that are gathered before the loop: those that
    each iteration needs unsharded; none if they exceed ``most`` elements.

    Args:
      jaxpr: The loop's body, or its condition.
      consts: The constants, the body's first operands, some of them a :class:`Shard`.
      mesh: The mesh of their specs.
      most: The most elements that the loop holds.
    """
    specs = [c.spec if isinstance(c, Shard) and not c.is_rounded else None for c in consts]
    if all(spec is None for spec in specs):
        return set()
    opened, _ = jaxprs.open_jaxpr(jaxpr)
    varies = DEPENDS.forward(opened, [i >= len(specs) for i in range(len(opened.invars))]).of
    needed = {
        i
        for i, (v, spec) in enumerate(zip(opened.invars, specs, strict=False))
        if spec is not None and _Needs(mesh).unsharded(opened, v, spec, varies)
    }
    return needed if sum(opened.invars[i].aval.size for i in needed) <= most else set()


class _Needs(NamedTuple):
    """The search for uses that need all of a constant at once, and not only layers, which the loop
    or an inner loop takes one by one."""

    mesh: Mesh

    def unsharded(self, jaxpr: Jaxpr, v: Atom, spec: Spec, varies: Mapping[Atom, bool]) -> bool:
        """Returns whether an open jaxpr needs all of ``v`` at once. ``varies`` is True for the
        variables that differ between iterations."""
        users = graph_of(jaxpr).users(v)
        return any(self._by(jaxpr, *use, spec, varies) for use in users)

    def _by(
        self, jaxpr: Jaxpr, eqn: Equation, i: int, spec: Spec, varies: Mapping[Atom, bool]
    ) -> bool:
        """Returns whether an equation needs all of its operand ``i`` at once."""
        if eqn.primitive.name in SAME_ELEMENTS:
            moved = propagate.forward(eqn, spec, self.mesh)
            return self.unsharded(jaxpr, eqn.outvars[0], spec if moved is None else moved, varies)
        if eqn.primitive.name == "dynamic_slice":
            is_layer = any(varies.get(v) for v in jaxprs.variables(eqn.invars[1:]))
            is_layer = is_layer and eqn.invars[0].aval.ndim > 2
            return not is_layer or propagate.forward(eqn, spec, self.mesh) is None
        inner = regions(eqn) if eqn.primitive is prims.scan_p or jaxprs.bodies(eqn) else ()
        return not inner or any(self._inside(each, eqn, i, spec, varies) for each in inner)

    def _inside(
        self, region: Region, eqn: Equation, i: int, spec: Spec, varies: Mapping[Atom, bool]
    ) -> bool:
        """Returns whether a program inside an equation needs all of the equation's operand ``i`` at
        once."""
        v = region.argument(i)
        if v is None or any(argument == i for _, argument in region.carries):
            return True
        if region.is_entry(i):
            return False
        argument_varies = [
            not isinstance(x, core.Literal) and varies.get(x, False)
            for x in (eqn.invars[at] for at in region.operands)
        ]
        return self.unsharded(
            region.jaxpr, v, spec, DEPENDS.forward(region.jaxpr, argument_varies).of
        )
