"""Lookups in one table that share its gather.

An encoder and a decoder look their tokens up in one table. Where so many are looked up that the
table is gathered, it would be gathered for either at stage 3. The later lookup needs nothing but
the table and the tokens, so it is done next to the first: its rows wait for the decoder, and the
gathered table does not. A module that computes in another dtype casts the table at each lookup;
one cast serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.collectives import propagate
from zerojax.collectives.adjacent import Wholes
from zerojax.collectives.gathering import Gatherer, plain
from zerojax.collectives.lookups import by_columns, spec_by_rows
from zerojax.collectives.shard import Shard
from zerojax.collectives.widening import like
from zerojax.devices.mesh import batch_devices
from zerojax.graph.graph import Graph, graph_of
from zerojax.graph.regions import regions
from zerojax.xla import jaxprs

MOST = 32
"""The most equations for the indices of a lookup that are moved with it; no loops."""


class Lookup(NamedTuple):
    """A lookup in a table: the equation, perhaps of a jitted function with the lookup in it, and
    the lookup itself."""

    equation: Any
    gather: Any


class Order(NamedTuple):
    """The equations of a program, each next to those that share a gather with it.

    Attributes:
      equations: All but repeated casts of a table, in order. The indices of lookups in several
        tables stand where the first of them needs these.
      copies: By result of the first cast of a table, the results of the repeated ones.
      shared: By ``id`` of an equation, the gathers that it shares.
      rows: By ``id`` of the last lookup of a group, the first results of all of them.
    """

    equations: Sequence[Any]
    copies: Mapping[Any, Sequence[Any]]
    shared: Mapping[int, Wholes]
    rows: Mapping[int, Sequence[Any]]

    def follow(self, eqn: Any, env: dict[Any, Any]) -> None:
        """Completes ``env`` after an equation: one cast gives the results of all that repeat it,
        and no row of a group is used before all are looked up. XLA might otherwise keep the table
        until the last row is."""
        for v in eqn.outvars:
            env.update(dict.fromkeys(self.copies.get(v, ()), env[v]))
        if (rows := self.rows.get(id(eqn))) is not None:
            held: list[jax.Array] = lax.optimization_barrier([plain(env[v]) for v in rows])
            env.update((v, like(env[v], x)) for v, x in zip(rows, held, strict=True))


def order(jaxpr: Any, args: Sequence[Any], gatherer: Gatherer) -> Order:
    """The order in which a program's equations run, and the casts of tables that it leaves out.

    Args:
      jaxpr: An open jaxpr, each of whose uses of a parameter gathers it.
      args: Its arguments, some of them a :class:`Shard`.
      gatherer: Gathers parameters.
    """
    graph = graph_of(jaxpr)
    copies: dict[Any, Sequence[Any]] = {}
    shared: dict[int, Wholes] = {}
    rows: dict[int, Sequence[Any]] = {}
    behind: dict[int, list[Any]] = {}  # by id of the first lookup, what is moved behind it
    for v, x in zip(jaxpr.invars, args, strict=True):
        if not isinstance(x, Shard) or x.gathered is not None or x.gathering.host:
            continue
        for table, *repeated in _forms(v, graph):
            casts = [graph.producer(each) for each in repeated]
            uses = [use for each in (table, *repeated) for use in graph.users(each)]
            uses.sort(key=lambda use: graph.place(use.equation))
            found = [_lookup(use.equation) for use in uses if use.position == 0]
            lookups = [each for each in found if each and _gathers(each, x, gatherer)]
            if len(lookups) < 2:
                continue
            first, *others = lookups
            group, moved = [first.equation], list[Any]()
            for other in others:
                before = _moved(other.equation, first.equation, graph, [*casts, *moved])
                if before is not None:
                    moved += [*before, other.equation]
                    group.append(other.equation)
            if len(group) > 1:
                wholes: Wholes = {}
                shared |= {id(eqn): wholes for eqn in group}
                rows[id(group[-1])] = [eqn.outvars[0] for eqn in group]
                behind[id(first.equation)] = moved
                copies[table] = repeated
    if not behind:
        return Order(jaxpr.eqns, {}, {}, {})
    casts = [graph.producer(each) for repeated in copies.values() for each in repeated]
    away = graph.without([*casts, *(eqn for moved in behind.values() for eqn in moved)])
    equations = [each for eqn in away for each in (eqn, *behind.get(id(eqn), ()))]
    once = {id(eqn): eqn for eqn in equations}  # indices of lookups in several tables
    return Order([*once.values()], copies, shared, rows)


def _forms(v: Any, graph: Graph) -> list[list[Any]]:
    """A parameter, and for each floating dtype to which it is cast the results of the casts, in
    order."""
    casts: dict[Any, list[Any]] = {}
    for use in graph.users(v):
        if use.equation.primitive is prims.convert_element_type_p:
            (out,) = use.equation.outvars
            if jnp.issubdtype(out.aval.dtype, jnp.floating):
                casts.setdefault(out.aval, []).append(out)
    return [[v], *casts.values()]


def _lookup(eqn: Any) -> Lookup | None:
    """The lookup of floating values that an equation is, in its first operand, or holds as a jitted
    function."""
    if not eqn.outvars or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    if eqn.primitive is prims.gather_p:
        return Lookup(eqn, eqn)
    if eqn.primitive is not prims.jit_p or eqn.effects:
        return None
    (body,) = jaxprs.bodies(eqn)
    uses = graph_of(body).users(body.invars[0])
    if len(uses) != 1 or uses[0].position or uses[0].equation.primitive is not prims.gather_p:
        return None
    return Lookup(eqn, uses[0].equation)


def _gathers(lookup: Lookup, table: Shard, gatherer: Gatherer) -> bool:
    """Whether a lookup gathers its table, and has no more rows a device than the table."""
    eqn, where = lookup.gather, (table.spec, gatherer.mesh, gatherer.axis)
    is_layer = propagate.forward(eqn, table.spec, gatherer.mesh) is not None  # of a stack
    if is_layer or spec_by_rows(eqn, *where) is not None or by_columns(eqn, *where):
        return False
    return eqn.outvars[0].aval.size <= table.value.size * batch_devices(gatherer.mesh)


def _moved(eqn: Any, first: Any, graph: Graph, known: Sequence[Any]) -> list[Any] | None:
    """The equations that compute the indices of a lookup after ``first``, in order, but for the
    ``known`` ones; None where these are more than a few equations on integers."""
    found: dict[int, Any] = {}
    left = jaxprs.variables(eqn.invars)
    have = {id(each) for each in known}
    while left:
        producer = graph.producer(left.pop())
        if producer is None or graph.place(producer) < graph.place(first) or id(producer) in have:
            continue
        integers = all(
            jnp.issubdtype(v.aval.dtype, jnp.integer) or v.aval.dtype == jnp.bool_
            for v in producer.outvars
        )
        loops = regions(producer) and producer.primitive not in jaxprs.CALLS
        if not integers or producer is first or loops or producer.effects or len(found) == MOST:
            return None
        found[graph.place(producer)] = producer
        left += jaxprs.variables(producer.invars)
    return [found[at] for at in sorted(found)]
