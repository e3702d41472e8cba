"""Gradients that a loop adds up over its iterations, and reduces after the last of them.

A loop over time (a recurrent network, ``lax.scan`` with a captured weight) takes a parameter as a
constant. Gathered within the loop, the parameter would be sent once an iteration, so it is gathered
before the loop. Its gradient is a value that the backward loop carries and adds to. Reduced within
the loop, the gradient would be sent once an iteration, too, so each device adds up its partial sum,
which is reduced after the loop.

A loop over layers takes its parameters as slices of a stack, one an iteration. Those are gathered
and reduced within the loop, also if the loop over layers is inside a loop over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import propagate
from zerojax.collectives.gathering import MOST
from zerojax.devices.mesh import axis_size
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import COPIES, LABELS, LINEAR, REARRANGES
from zerojax.graph.regions import regions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, MaybeNone

_MOVES = COPIES | REARRANGES | {"neg"}
_SAME_ELEMENTS = LABELS | LINEAR | {"transpose"}


class Term(NamedTuple):
    """A term that an iteration adds to a carried value.

    Attributes:
      root: the variable to add up instead of the term: a product, for example.
      links: the equations that compute the term from the root, each with the position of the
        result: they move or round elements, so that they can run once, after the loop.
    """

    root: Atom
    links: tuple[tuple[Equation, int], ...]

    def of(self, root: jax.Array) -> jax.Array:
        """Returns the sum of the term, from the sum of the root."""
        for eqn, i in self.links:
            root = jaxprs.bind(eqn, [root])[i]
        return root

    def spec(self, spec: Spec, mesh: Mesh) -> Spec | None:
        """Returns the spec of the root for a term of spec ``spec``; None if elements would move
        between devices from one to the other."""
        root: Spec | None = spec
        for eqn, _ in reversed(self.links):
            name = eqn.primitive.name
            if root is None or (name == "split" and root[jaxprs.param(eqn, "axis")] is not None):
                return None
            root = propagate.backward(eqn, root, mesh) if name in propagate.BACKWARD else root
        return root


class CarriedSums:
    """The carried values of a scan that the loop only adds to.

    They are the gradients of the scan's constants, in the form in which JAX computes them. A
    gradient that the user's loop adds up over micro-batches is not one of them: each iteration
    produces complete gradients, which are reduced at once. Nor is the gradient of a stack of
    layers, if an inner loop computes that gradient layer by layer, or if the loop itself takes one
    layer of the stack an iteration.

    Args:
      loop: the scan.
      want: for each carried value, the target spec of its sum; None if it is not a gradient.
      most: the most elements of all sums together; the loop adds up none if they exceed it.

    Attributes:
      want: by position of a carried value, the target spec of its sum, if there is one.
      terms: by position of a carried value, the terms that an iteration adds to it.
      roots: the variables to add up.
      stacks: positions of the carried values that are stacks, to which an iteration adds one layer.
    """

    want: dict[int, Spec]
    roots: list[Atom]

    def __init__(self, loop: ScanParts, want: Sequence[Spec | None], most: int = MOST) -> None:
        self.terms: dict[int, list[Term]] = {}
        self.stacks: set[int] = set()
        self.want = {i: spec for i, spec in enumerate(want) if spec is not None}
        self._body, (self._jaxpr, _) = loop.body, jaxprs.open_jaxpr(loop.body)
        self._graph = graph_of(self._jaxpr)
        self._adds: list[Equation] = []
        _, starts, _ = loop.operands(self._jaxpr.invars)
        for i, (out, start) in enumerate(zip(self._jaxpr.outvars, starts, strict=False)):
            added = self._added(out, start) if i in self.want else None
            if added is not None and any(_is_layer(self._jaxpr, v) for v in added[0]):
                self.stacks.add(i)
            elif added is not None and not any(_is_stack(self._jaxpr, v) for v in added[0]):
                self.terms[i] = [self._term(v) for v in added[0]]
                self._adds += added[1]
        self.roots = list(dict.fromkeys(t.root for ts in self.terms.values() for t in ts))
        # Each device holds the full sums for as long as the loop runs.
        if sum(v.aval.size for v in self.roots) > most:
            self.terms, self.roots, self._adds = {}, [], []

    def _added(self, v: Atom, start: Atom) -> tuple[list[Atom], list[Equation]] | None:
        """Returns the variables whose sum with ``start`` is ``v``, and the equations that add them;
        None if ``v`` is not such a sum, or has other uses."""
        eqn, uses = self._graph.producer(v), self._graph.times_used
        # JAX adds up the cotangents of a scan's constants by add_any; a sum that the user writes is
        # an add.
        if eqn is None or eqn.primitive.name != "add_any" or uses(v) != 1:
            return None
        for partial, term in (eqn.invars, eqn.invars[::-1]):
            if not _is_var(term) or term is start:
                continue
            if partial is start:
                return ([term], [eqn]) if uses(start) == 1 else None
            if (inner := self._added(partial, start)) is not None:
                return [*inner[0], term], [*inner[1], eqn]
        return None

    def _term(self, v: Atom) -> Term:
        links: list[tuple[Equation, int]] = []
        while (eqn := self._graph.producer(v)) and (eqn.primitive.name in _MOVES or _narrows(eqn)):
            if not _is_var(eqn.invars[0]):
                break
            links.append((eqn, eqn.outvars.index(v)))
            v = eqn.invars[0]
        return Term(v, tuple(reversed(links)))

    def body(self) -> AnyJaxpr:
        """Returns the loop's body without the sums, and with the roots after its other results. It
        does not read the carried values of the sums."""
        results = [v for i, v in enumerate(self._jaxpr.outvars) if i not in self.terms]
        eqns, outs = self._graph.without(self._adds), [*results, *self.roots]
        body: AnyJaxpr = jaxprs.with_body(self._body, self._jaxpr.replace(eqns=eqns, outvars=outs))
        return body

    def _terms_of(self, root: Atom) -> list[tuple[Term, Spec]]:
        """Returns the terms that are computed from a root, each with the target spec of its sum."""
        return [
            (term, self.want[i])
            for i, terms in self.terms.items()
            for term in terms
            if term.root is root
        ]

    def targets(self, root: Atom) -> list[Spec]:
        """Returns the target specs of the sums that are computed from a root."""
        return [spec for _, spec in self._terms_of(root)]

    def producer(self, root: Atom) -> Equation | MaybeNone:
        """Returns the equation that computes a root; None for an entry that the loop reads."""
        return self._graph.producer(root)

    def spec(self, root: Atom, mesh: Mesh, axis: str) -> Spec | None:
        """Returns the spec of the sum of a root: the spec that its terms imply. If their specs
        differ, or imply none, the shard axis splits the largest dimension that it divides; None if
        no such dimension exists, or if the user's spec shards a term as well."""
        wants = self._terms_of(root)
        specs = {term.spec(spec, mesh) for term, spec in wants}
        if len(specs) == 1 and (only := specs.pop()) is not None:
            return only
        if any(any(layout.without(spec, axis)) for _, spec in wants):
            return None
        shape = root.aval.shape
        divisible = [d for d, size in enumerate(shape) if size % axis_size(mesh, axis) == 0]
        at = max(divisible, key=lambda d: shape[d], default=None)
        return None if at is None else tuple(axis if d == at else None for d in range(len(shape)))


def _is_var(v: Atom) -> bool:
    return not isinstance(v, core.Literal)


def _narrows(eqn: Equation) -> bool:
    """Returns whether an equation rounds to a narrower floating dtype, which is better done to the
    sum than to each term."""
    return eqn.primitive.name == "convert_element_type" and wider(eqn.invars[0], eqn.outvars[0])


def wider(one: Atom, other: Atom) -> bool:
    """Returns whether both variables have floating dtypes, and that of ``one`` has more bytes."""
    dtypes = one.aval.dtype, other.aval.dtype
    floats = all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
    return floats and dtypes[0].itemsize > dtypes[1].itemsize


def _is_stack(jaxpr: Jaxpr, v: Atom) -> bool:
    """Returns whether a loop stacks the value, one entry an iteration."""
    eqn = graph_of(jaxpr).producer(v)
    if eqn is None:
        return False
    at = eqn.outvars.index(v)
    if eqn.primitive is prims.scan_p:
        return regions(eqn)[0].is_stacked(at)
    return any(_is_stack(body, body.outvars[at]) for body in jaxprs.bodies(eqn)) or (
        eqn.primitive.name in _SAME_ELEMENTS and _is_stack(jaxpr, eqn.invars[0])
    )


def _is_layer(jaxpr: Jaxpr, v: Atom) -> bool:
    """Returns whether a value is one layer among zeros: the gradient of a stack from which a loop
    takes one layer."""
    graph = graph_of(jaxpr)
    eqn = graph.producer(v)
    # JAX's derivative of a dynamic_slice writes the cotangent into zeros.
    is_written = eqn is not None and eqn.primitive.name == "dynamic_update_slice"
    return is_written and v.aval.ndim > 2 and graph.is_zeros(eqn.invars[0])
