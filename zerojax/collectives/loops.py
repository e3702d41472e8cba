"""What a loop uses whole in every iteration, and what it adds up over all of them.

A loop over time (a recurrent network, ``lax.scan`` with a captured weight) takes a parameter as
a constant. Gathered within, it would be sent once an iteration; so it is gathered before. Its
gradient is a value that the backward loop carries and adds to. Reduced within, it would be sent
once an iteration, too; so each device adds up its own part, which is reduced after the loop.

A loop over layers takes its parameters as slices of a stack, one an iteration. Those are gathered
and reduced within. So they are where a loop over time has such a loop in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import propagate
from zerojax.collectives.held import MOST, SAME_ELEMENTS
from zerojax.devices.mesh import axis_size
from zerojax.graph.graph import graph_of
from zerojax.graph.primitives import COPIES, REARRANGES
from zerojax.graph.regions import regions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs

_MOVES = COPIES | REARRANGES | {"neg"}


@dataclass(frozen=True, eq=False)
class LoopBody:
    """A jaxpr with other equations or results."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    eqns: Sequence[Any]
    outvars: Sequence[Any]
    consts: Sequence[Any]


class Term(NamedTuple):
    """What an iteration adds to a carried value.

    Attributes:
      root: the variable to add up: as it is made, a product say.
      links: equations that give the term from it, and which of their results: those that move
        elements, which can be done once, after the loop.
    """

    root: Any
    links: tuple[tuple[Any, int], ...]

    def of(self, root: jax.Array) -> jax.Array:
        """The sum of the term, from that of the root."""
        for eqn, i in self.links:
            root = jaxprs.bind(eqn, [root])[i]
        return root

    def spec(self, spec: Spec, mesh: Mesh) -> Spec | None:
        """The spec of the root where that of the term is ``spec``; None where no device could keep
        its piece."""
        root: Spec | None = spec
        for eqn, _ in reversed(self.links):
            name = eqn.primitive.name
            if root is None or (name == "split" and root[jaxprs.param(eqn, "axis")] is not None):
                return None
            root = propagate.backward(eqn, root, mesh) if name in propagate.BACKWARD else root
        return root


class Sums:
    """The carried values of a scan that start from something and are only added to.

    They are the gradients of its constants as jax makes them. A gradient that the user's own loop
    adds up, over micro-batches, is none of them: there each iteration makes whole gradients, and
    they are reduced as they are made. Nor is the gradient of a stack of layers, that a loop within
    makes one layer at a time, or of one from which the loop itself takes a layer an iteration.

    Args:
      eqn: the scan.
      want: for each carried value, the spec of its sum; None where any will do.

    Attributes:
      want: by number of the carried value, the spec of its sum, where there is one.
      terms: by number of the carried value, what an iteration adds to it.
      roots: the variables to add up.
      stacks: numbers of the carried values that are stacks, to which an iteration adds one layer.
    """

    def __init__(self, eqn: Any, want: Sequence[Spec | None]) -> None:
        self.terms: dict[int, list[Term]] = {}
        self.stacks: set[int] = set()
        self.want = {i: spec for i, spec in enumerate(want) if spec is not None}
        self._jaxpr, self._consts = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))
        self._graph = graph_of(self._jaxpr)
        a, n = jaxprs.scan_counts(eqn)
        self._adds: list[Any] = []
        for i, out in enumerate(self._jaxpr.outvars[:n]):
            start = self._jaxpr.invars[a + i]
            added = self._added(out, start) if i in self.want else None
            if added is not None and any(_is_layer(self._jaxpr, v) for v in added[0]):
                self.stacks.add(i)
            elif added is not None and not any(_is_stack(self._jaxpr, v) for v in added[0]):
                self.terms[i] = [self._term(v) for v in added[0]]
                self._adds += added[1]
        self.roots = list(dict.fromkeys(t.root for ts in self.terms.values() for t in ts))
        if sum(v.aval.size for v in self.roots) > MOST:
            self.terms, self.roots, self._adds = {}, [], []

    def _added(self, v: Any, start: Any) -> tuple[list[Any], list[Any]] | None:
        """What is added to ``start`` to make ``v``, and the equations that do; None where ``v``
        is made otherwise, or is used besides."""
        eqn, uses = self._graph.producer(v), self._graph.times_used
        if eqn is None or eqn.primitive.name != "add_any" or uses(v) != 1:
            return None
        for one, other in (eqn.invars, eqn.invars[::-1]):
            if not _is_var(other) or other is start:
                continue
            if one is start:
                return ([other], [eqn]) if uses(start) == 1 else None
            if (rest := self._added(one, start)) is not None:
                return [*rest[0], other], [*rest[1], eqn]
        return None

    def _term(self, v: Any) -> Term:
        links: list[tuple[Any, int]] = []
        while (eqn := self._graph.producer(v)) and (eqn.primitive.name in _MOVES or _narrows(eqn)):
            if not _is_var(eqn.invars[0]):
                break
            links.append((eqn, eqn.outvars.index(v)))
            v = eqn.invars[0]
        return Term(v, tuple(reversed(links)))

    def body(self) -> LoopBody:
        """The loop's body with the roots behind its other results, and without the sums; what is
        carried for those is not read."""
        jaxpr = self._jaxpr
        kept = [v for i, v in enumerate(jaxpr.outvars) if i not in self.terms]
        eqns = self._graph.without(self._adds)
        return LoopBody(jaxpr.constvars, jaxpr.invars, eqns, [*kept, *self.roots], self._consts)

    def spec(self, root: Any, mesh: Mesh, axis: str) -> Spec | None:
        """The spec of the sum of a root: that of its terms. Where those differ, or no device could
        keep its piece, the shard axis over the largest dimension that it divides; None where no
        such dimension exists, or the user shards the terms as well."""
        wants = [
            (term, self.want[i])
            for i, terms in self.terms.items()
            for term in terms
            if term.root is root
        ]
        specs = {term.spec(spec, mesh) for term, spec in wants}
        if len(specs) == 1 and (only := specs.pop()) is not None:
            return only
        if any(any(layout.without(spec, axis)) for _, spec in wants):
            return None
        shape = root.aval.shape
        fits = [d for d, size in enumerate(shape) if size % axis_size(mesh, axis) == 0]
        at = max(fits, key=lambda d: shape[d], default=None)
        return None if at is None else tuple(axis if d == at else None for d in range(len(shape)))


def _is_var(v: Any) -> bool:
    return not isinstance(v, core.Literal)


def _narrows(eqn: Any) -> bool:
    """Whether it rounds to a smaller floating dtype, which is better done to the sum."""
    return eqn.primitive.name == "convert_element_type" and wider(eqn.invars[0], eqn.outvars[0])


def wider(one: Any, other: Any) -> bool:
    """Whether both are of floating dtypes, and that of ``one`` has more bytes."""
    dtypes = one.aval.dtype, other.aval.dtype
    floats = all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
    return floats and dtypes[0].itemsize > dtypes[1].itemsize


def _is_stack(jaxpr: Any, v: Any) -> bool:
    """Whether a loop stacks it, an entry an iteration."""
    eqn = graph_of(jaxpr).producer(v)
    if eqn is None:
        return False
    at = eqn.outvars.index(v)
    if eqn.primitive is prims.scan_p:
        return regions(eqn)[0].is_stacked(at)
    return any(_is_stack(body, body.outvars[at]) for body in jaxprs.bodies(eqn)) or (
        eqn.primitive.name in SAME_ELEMENTS and _is_stack(jaxpr, eqn.invars[0])
    )


def _is_layer(jaxpr: Any, v: Any) -> bool:
    """Whether a value is one layer among zeros: the gradient where a loop takes one layer."""
    graph = graph_of(jaxpr)
    eqn = graph.producer(v)
    written = eqn is not None and eqn.primitive.name == "dynamic_update_slice"
    return written and v.aval.ndim > 2 and graph.is_zeros(eqn.invars[0])
