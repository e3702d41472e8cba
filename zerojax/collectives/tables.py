"""Lookups in one table that share its gather.

An encoder and a decoder look their tokens up in one table. If they look up so many that the table
is gathered, each lookup would gather it at stage 3. The later lookup needs only the table and the
tokens, so it runs directly after the first: its rows are kept for the decoder, and not the gathered
table. A module that computes in another dtype casts the table at each lookup; one cast serves all
lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.collectives import propagate
from zerojax.collectives.adjacent import GatheredArrays
from zerojax.collectives.gathering import Gatherer, plain
from zerojax.collectives.lookups import by_columns, spec_by_rows
from zerojax.collectives.shard import Shard
from zerojax.collectives.widening import like
from zerojax.devices.mesh import batch_devices
from zerojax.graph.def_use import Graph, graph_of
from zerojax.graph.regions import regions
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Aval, Equation, Jaxpr

MOST = 32
"""The most equations, without loops, that compute a lookup's indices and are moved with it."""


class Lookup(NamedTuple):
    """A lookup in a table: the equation of the program, perhaps the call of a jitted function, and
    the gather itself, in that function."""

    equation: Equation
    gather: Equation


class Order(NamedTuple):
    """The equations of a program, each next to those that share a gather with it.

    Attributes:
      equations: All equations except repeated casts of a table, in order. Indices for lookups in
        several tables are computed where the first lookup needs them.
      copies: By result of the first cast of a table, the results of the repeated ones.
      shared: By ``id`` of an equation, the gathers that it shares.
      rows: By ``id`` of the last lookup of a group, the first result of each lookup of the group.
    """

    equations: Sequence[Equation]
    copies: Mapping[Atom, Sequence[Atom]]
    shared: Mapping[int, GatheredArrays]
    rows: Mapping[int, Sequence[Atom]]

    def follow(self, eqn: Equation, env: dict[Atom, Any]) -> None:
        """Completes ``env`` after an equation: the result of a cast serves all casts that repeat
        it, and no rows of a group are used before all of them are looked up. Otherwise XLA might
        keep the table until the last lookup."""
        for v in eqn.outvars:
            env.update(dict.fromkeys(self.copies.get(v, ()), env[v]))
        if (rows := self.rows.get(id(eqn))) is not None:
            held: list[jax.Array] = lax.optimization_barrier([plain(env[v]) for v in rows])
            env.update((v, like(env[v], x)) for v, x in zip(rows, held, strict=True))


def order(jaxpr: Jaxpr, args: Sequence[object], gatherer: Gatherer) -> Order:
    """Returns the order in which a program's equations run, without repeated casts of tables.

    Args:
      jaxpr: An open jaxpr in which each use of a parameter gathers it.
      args: Its arguments, some of them a :class:`Shard`.
      gatherer: Gathers parameters.
    """
    graph = graph_of(jaxpr)
    copies: dict[Atom, Sequence[Atom]] = {}
    shared: dict[int, GatheredArrays] = {}
    rows: dict[int, Sequence[Atom]] = {}
    # By id of the first lookup, the equations moved after it.
    followers: dict[int, list[Equation]] = {}
    for v, x in zip(jaxpr.invars, args, strict=True):
        if not isinstance(x, Shard) or x.gathered is not None or x.gathering.host:
            continue
        for table, *repeated in _forms(v, graph):
            casts = [graph.producer(each) for each in repeated]
            uses = [use for each in (table, *repeated) for use in graph.users(each)]
            uses.sort(key=lambda use: graph.place(use.equation))
            candidates = [_lookup(use.equation) for use in uses if use.position == 0]
            lookups = [each for each in candidates if each and _gathers(each, x, gatherer)]
            if len(lookups) < 2:
                continue
            first, *others = lookups
            group, moved = [first.equation], list[Equation]()
            for other in others:
                needed = _moved(other.equation, first.equation, graph, [*casts, *moved])
                if needed is not None:
                    moved += [*needed, other.equation]
                    group.append(other.equation)
            if len(group) > 1:
                gathers: GatheredArrays = {}
                shared |= {id(eqn): gathers for eqn in group}
                rows[id(group[-1])] = [eqn.outvars[0] for eqn in group]
                followers[id(first.equation)] = moved
                copies[table] = repeated
    if not followers:
        return Order(jaxpr.eqns, {}, {}, {})
    casts = [graph.producer(each) for repeated in copies.values() for each in repeated]
    remaining = graph.without([*casts, *(eqn for moved in followers.values() for eqn in moved)])
    equations = [each for eqn in remaining for each in (eqn, *followers.get(id(eqn), ()))]
    unique = {id(eqn): eqn for eqn in equations}  # indices of lookups in several tables
    return Order([*unique.values()], copies, shared, rows)


def _forms(v: Atom, graph: Graph) -> list[list[Atom]]:
    """Returns a list of the parameter itself and, for each floating dtype to which it is cast, a
    list of the results of the casts, in order."""
    casts: dict[Aval, list[Atom]] = {}
    for use in graph.users(v):
        if use.equation.primitive is prims.convert_element_type_p:
            (out,) = use.equation.outvars
            if jnp.issubdtype(out.aval.dtype, jnp.floating):
                casts.setdefault(out.aval, []).append(out)
    return [[v], *casts.values()]


def _lookup(eqn: Equation) -> Lookup | None:
    """Returns an equation as a lookup of floating values in its first operand, directly or in a
    jitted function; None if it is not one."""
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
    """Returns whether a lookup gathers its table, and looks up no more rows on each device than the
    table has."""
    eqn, placement = lookup.gather, (table.spec, gatherer.mesh, gatherer.axis)
    is_layer = propagate.forward(eqn, table.spec, gatherer.mesh) is not None  # of a stack
    if is_layer or spec_by_rows(eqn, *placement) is not None or by_columns(eqn, *placement):
        return False
    return eqn.outvars[0].aval.size <= table.value.size * batch_devices(gatherer.mesh)


def _moved(
    eqn: Equation, first: Equation, graph: Graph, known: Sequence[Equation]
) -> list[Equation] | None:
    """Returns the equations after ``first`` that compute the indices of a lookup, in order, without
    the ``known`` ones; None if they are more than :data:`MOST`, or not loop-free integer code."""
    producers: dict[int, Equation] = {}
    pending = jaxprs.variables(eqn.invars)
    ids = {id(each) for each in known}
    while pending:
        producer = graph.producer(pending.pop())
        if producer is None or graph.place(producer) < graph.place(first) or id(producer) in ids:
            continue
        is_integer = all(
            jnp.issubdtype(v.aval.dtype, jnp.integer) or v.aval.dtype == jnp.bool_
            for v in producer.outvars
        )
        has_loops = regions(producer) and producer.primitive not in jaxprs.CALLS
        if (
            not is_integer
            or producer is first
            or has_loops
            or producer.effects
            or len(producers) == MOST
        ):
            return None
        producers[graph.place(producer)] = producer
        pending += jaxprs.variables(producer.invars)
    return [producers[at] for at in sorted(producers)]
