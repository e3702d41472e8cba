"""The functions of matrices in an optimizer's update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from zerojax.collectives import propagate
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.primitives import CALLBACKS, ELEMENTWISE, FACTORIZATIONS, KERNELS, PRODUCTS
from zerojax.graph.reach import EQUATION_DEPENDS
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr

_MOST = 8  # values of one optimizer's rule for one parameter that are computed side by side

_PLACED = KERNELS | CALLBACKS | {"reshard", "sharding_constraint"}


class MatrixFunction(NamedTuple):
    """Equations that compute some arrays of one parameter from others, among them products of
    matrices.

    Attributes:
      operands: The arrays from which they compute.
      results: The arrays that they compute.
      like: For each result, the position of an operand of the same shape.
      equations: The equations, in order.
      shared: Other values that they read: arguments and constants of the program that are the same
        for every parameter.
    """

    operands: Sequence[Atom]
    results: Sequence[Atom]
    like: Sequence[int]
    equations: Sequence[Equation]
    shared: Sequence[Atom]


def is_placed(eqn: Equation) -> bool:
    """Returns whether an equation concerns the devices, or is a kernel or a call of a Python
    function, which ``jax.vmap`` may not know."""
    if eqn.primitive.name == "device_put":
        return any(device is not None for device in jaxprs.param(eqn, "devices"))
    return eqn.primitive.name in _PLACED


def computes_with_matrices(eqn: Equation) -> bool:
    """Returns whether an equation multiplies or factorizes matrices."""
    name = eqn.primitive.name
    return (name in PRODUCTS and eqn.outvars[0].aval.ndim > 1) or name in FACTORIZATIONS


def find(jaxpr: Jaxpr, specs: Mapping[Atom, Spec]) -> list[MatrixFunction]:
    """Finds the functions of matrices in an open jaxpr without calls.

    A function begins at values that suffice to compute all its products, and ends at values
    through which all results of the products go. Of several such places in the program those with
    the fewest bytes are chosen, since the values are sent to other devices.

    Args:
      jaxpr: The update.
      specs: The specs of values, by variable, from :func:`known_specs`.
    """
    depends = _dependent(jaxpr, _of_parameters(jaxpr, specs))
    return [
        function
        for products in _connected(jaxpr, depends)
        if (function := _function(graph_of(jaxpr), products, depends, specs)) is not None
    ]


def _dependent(jaxpr: Jaxpr, of_parameters: Sequence[bool]) -> set[Atom]:
    """Returns the values that depend on the selected arguments."""
    found = EQUATION_DEPENDS.forward(jaxpr, of_parameters).of
    return {v for v, is_dependent in found.items() if is_dependent}


def _of_parameters(jaxpr: Jaxpr, specs: Mapping[Atom, Spec]) -> list[bool]:
    """Returns, for each argument, whether it belongs to one parameter.

    The others are shared by all parameters: numbers and coefficients. Coefficients of several
    dimensions are not sharded, and the update returns them unchanged, or functions of matrices that
    are independent of one another read them.
    """
    is_sharded = [any(specs.get(v, ())) for v in jaxpr.invars]
    sharded = {v.aval.shape for v, s in zip(jaxpr.invars, is_sharded, strict=True) if s}
    may_belong = [s or v.aval.ndim > 1 for s, v in zip(is_sharded, jaxpr.invars, strict=True)]
    uncertain = [
        v
        for v, may in zip(jaxpr.invars, may_belong, strict=True)
        if may and v.aval.shape not in sharded
    ]
    if not uncertain:
        return may_belong
    graph, connected = graph_of(jaxpr), [*_connected(jaxpr, _dependent(jaxpr, may_belong))]

    def is_shared(v: Atom) -> bool:
        reached = _dependent(jaxpr, [v is other for other in jaxpr.invars])
        readers = sum(not reached.isdisjoint(_read(group, reached)) for group in connected)
        return bool(graph.returned(v)) or readers > 1

    shared = {v for v in uncertain if is_shared(v)}
    return [may and v not in shared for may, v in zip(may_belong, jaxpr.invars, strict=True)]


def known_specs(jaxpr: Jaxpr, given: Sequence[Spec | None], mesh: Mesh) -> dict[Atom, Spec]:
    """Returns the specs of the values that are computed element by element from arguments.

    Args:
      jaxpr: An open jaxpr without calls.
      given: The specs of its arguments; None for an unknown spec.
      mesh: The devices.
    """
    pairs = zip(jaxpr.invars, given, strict=True)
    specs = {v: spec for v, spec in pairs if spec is not None}
    for eqn in jaxpr.eqns:
        known = [(v.aval.shape, specs[v]) for v in jaxprs.variables(eqn.invars) if v in specs]
        spec: Spec | None = None
        if eqn.primitive.name in ELEMENTWISE:
            # XLA computes with the operand that is sharded over more devices.
            spec = max(
                (spec for shape, spec in known if shape == eqn.outvars[0].aval.shape),
                key=lambda spec: math.prod(layout.parts(entry, mesh) for entry in spec),
                default=None,
            )
        elif known and propagate.moves(eqn.primitive.name):
            spec = propagate.forward(eqn, known[0][1], mesh)
        if spec is not None:
            specs[eqn.outvars[0]] = spec
    return specs


def _connected(jaxpr: Jaxpr, depends: set[Atom]) -> Iterator[list[Equation]]:
    """Yields the equations with matrices that compute from one another, with all equations between
    them, in order."""
    groups: dict[int, int] = {}  # each group's number, by the numbers of those that it joined

    def root(number: int) -> int:
        while groups[number] != number:
            number = groups[number]
        return number

    behind: dict[Atom, int] = {}  # values that are computed from a product
    members: list[tuple[int, Equation]] = []
    for eqn in jaxpr.eqns:
        operands = [v for v in jaxprs.variables(eqn.invars) if v in depends]
        joined = {root(behind[v]) for v in operands if v in behind and v.aval.ndim > 1}
        if operands and contains(eqn, computes_with_matrices):
            number = min(joined, default=len(groups))
            groups.setdefault(number, number)
            groups.update(dict.fromkeys(joined, number))
            members.append((number, eqn))
            joined = {number}
        if joined:
            behind.update(dict.fromkeys(eqn.outvars, min(joined)))
    for number in dict.fromkeys(root(n) for n, _ in members):
        products = [eqn for n, eqn in members if root(n) == number]
        yield _between(graph_of(jaxpr), products)


def _between(graph: Graph, products: Sequence[Equation]) -> list[Equation]:
    """Returns the products and the equations on the paths between them, in order."""
    first, last = graph.place(products[0]), graph.place(products[-1])
    after: dict[int, Equation] = {}
    todo = [*products]
    while todo:
        eqn = todo.pop()
        place = graph.place(eqn)
        if place not in after and place <= last:
            after[place] = eqn
            todo += [use.equation for v in eqn.outvars for use in graph.users(v)]
    needed: dict[int, Equation] = {}
    todo = [*products]
    while todo:
        eqn = todo.pop()
        place = graph.place(eqn)
        if place in after and place not in needed and place >= first:
            needed[place] = eqn
            producers = (graph.producer(v) for v in eqn.invars)
            todo += [producer for producer in producers if producer is not None]
    return [needed[place] for place in sorted(needed)]


def _function(
    graph: Graph, core: Sequence[Equation], depends: set[Atom], specs: Mapping[Atom, Spec]
) -> MatrixFunction | None:
    """Returns the function around these equations; None if the spec of an operand is unknown, a
    result has the shape of no operand, or an equation concerns the devices."""
    fronts = [
        front
        for front in _operands(graph, core, depends)
        if all(v.aval.ndim > 1 and v in specs for v in front)
    ]
    if not fronts:
        return None
    operands = min(reversed(fronts), key=_bytes)
    equations = _from(graph, operands, core, depends)
    shapes = [v.aval.shape for v in operands]
    ends = [
        end
        for end in _results(graph, equations, core, depends)
        if all(v.aval.shape in shapes for v in end.results)
    ]
    if not ends:
        return None
    end = min(ends, key=lambda end: _bytes(end.results))
    equations, shared = _closed(graph, [*equations, *end.equations], operands, depends)
    if any(contains(eqn, is_placed) for eqn in equations):
        return None
    like = [shapes.index(v.aval.shape) for v in end.results]
    return MatrixFunction(operands, end.results, like, equations, shared)


def _variables(equations: Sequence[Equation]) -> list[Atom]:
    return [v for eqn in equations for v in jaxprs.variables(eqn.invars)]


def _bytes(values: Sequence[Atom]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in values)


def _read(equations: Sequence[Equation], depends: set[Atom]) -> list[Atom]:
    """Returns the values that equations read and do not compute."""
    computed = {v for eqn in equations for v in eqn.outvars}
    read = [v for eqn in equations for v in jaxprs.variables(eqn.invars) if v in depends]
    return [v for v in dict.fromkeys(read) if v not in computed]


def _operands(graph: Graph, core: Sequence[Equation], depends: set[Atom]) -> list[list[Atom]]:
    """Returns the sets of values that suffice to compute the equations, the last ones first."""
    found = []
    front = _read(core, depends)
    while len(front) <= _MOST:
        found.append(front)
        producers = {graph.place(e): e for v in front if (e := graph.producer(v)) is not None}
        if not producers:
            break
        eqn = producers[max(producers)]
        before = [v for v in jaxprs.variables(eqn.invars) if v in depends]
        front = [v for v in dict.fromkeys([*front, *before]) if v not in eqn.outvars]
    return found


def _from(
    graph: Graph, operands: Sequence[Atom], core: Sequence[Equation], depends: set[Atom]
) -> list[Equation]:
    """Returns the equations with those that lead to them from the operands, in order."""
    read = graph.backward_slice(_variables(core), lambda v: v in operands or v not in depends)
    return sorted({*core, *read.equations}, key=graph.place)


class _End(NamedTuple):
    """Values through which all results of the products go, and the equations that compute them from
    the last product."""

    results: Sequence[Atom]
    equations: Sequence[Equation]


def _results(
    graph: Graph, equations: Sequence[Equation], core: Sequence[Equation], depends: set[Atom]
) -> list[_End]:
    """Returns the places where a function may end, the first one first."""
    inside = {graph.place(eqn) for eqn in equations}
    known = {v for eqn in equations for v in eqn.outvars} | {*_read(equations, depends)}
    behind: dict[Atom, None] = {}  # values that are computed from a product
    for eqn in core:
        if contains(eqn, computes_with_matrices) or any(
            v in behind for v in jaxprs.variables(eqn.invars)
        ):
            behind.update(dict.fromkeys(eqn.outvars))
    found: list[_End] = []
    after: list[Equation] = []
    while True:
        uses = {v: [use.equation for use in graph.users(v)] for v in behind}
        uses = {v: [e for e in eqns if graph.place(e) not in inside] for v, eqns in uses.items()}
        front = [v for v in behind if uses[v] or graph.returned(v)]
        if len(front) <= _MOST:
            found.append(_End(front, [*after]))
        followers = {
            graph.place(e): e
            for v in front
            for e in uses[v]
            if known.issuperset(u for u in jaxprs.variables(e.invars) if u in depends)
        }
        if not followers:
            return found
        eqn = followers[min(followers)]
        inside.add(graph.place(eqn))
        after.append(eqn)
        known.update(eqn.outvars)
        behind.update(dict.fromkeys(eqn.outvars))


def _closed(
    graph: Graph, equations: Sequence[Equation], operands: Sequence[Atom], depends: set[Atom]
) -> tuple[list[Equation], list[Atom]]:
    """Adds the equations that compute values that are independent of all parameters; returns all
    equations in order, and the arguments and constants that remain to be read."""
    known = {*operands, *depends}
    read = graph.backward_slice(_variables(equations), known.__contains__)
    shared = [v for v in read.ends if v not in known]
    return sorted({*equations, *read.equations}, key=graph.place), shared
