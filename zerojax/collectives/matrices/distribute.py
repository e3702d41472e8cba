"""An optimizer's update with its functions of matrices distributed over the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.collectives.decisions import EXCHANGE, UPDATE
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.matrices import entry
from zerojax.collectives.matrices.entry import Entries, NotByEntry, Stack
from zerojax.collectives.matrices.exchange import Exchange, axes_of
from zerojax.collectives.matrices.find import (
    MatrixFunction,
    computes_with_matrices,
    find,
    known_specs,
)
from zerojax.graph.def_use import graph_of
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.state_sharding import Plan
from zerojax.plan.stored import pad
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr


class _Member(NamedTuple):
    """A function of one parameter's arrays.

    Attributes:
      function: The function.
      matrices: The number of entries along the leading dimensions, each a matrix of its own.
      leading: The number of these dimensions.
      shardings: The shardings of one entry of each operand.
      program: The function of one entry and of the shared values.
    """

    function: MatrixFunction
    matrices: int
    leading: int
    shardings: Sequence[NamedSharding]
    program: AnyJaxpr


class MatrixUpdate:
    """Runs an optimizer's update on shards.

    Equal functions of matrices run on a stack, of which each device has some matrices; the other
    equations run as they are. If K matrices do not divide among N devices, the stack is filled with
    copies of its first ones, so that each device computes with K / N matrices, rounded up. An
    all-to-all brings each operand there, another brings the results back to the shards.

    Functions that read matrices which no axis shards, that mix several parameters, or that are of a
    form that :mod:`zerojax.collectives.matrices.find` does not know run as they are.

    Args:
      gatherer: Records the collectives; has the devices.
      shapes, specs: The shapes and the specs of the update's arguments, flat.
    """

    def __init__(
        self, gatherer: Gatherer, shapes: Sequence[tuple[int, ...]], specs: Sequence[Spec]
    ) -> None:
        self._gatherer, self._shapes, self._specs = gatherer, shapes, specs

    @classmethod
    def of(cls, gatherer: Gatherer, plan: Plan, opt_state: Sequence[Leaf]) -> MatrixUpdate:
        """Returns the update of all parameters of a plan.

        Args:
          gatherer: Records the collectives.
          plan: The plan.
          opt_state: The leaves of the optimizer's own state, without zerojax's.
        """
        params = plan.leaves["params"]
        leaves = [*params, *opt_state, *params]
        grads = jax.tree.leaves(plan.grads, is_leaf=lambda x: isinstance(x, PartitionSpec))
        specs = [*grads, *(leaf.spec for leaf in leaves[len(params) :])]
        shapes = [leaf.shape for leaf in leaves]
        full = [layout.full(spec, len(shape)) for spec, shape in zip(specs, shapes, strict=True)]
        return cls(gatherer, shapes, full)

    def __call__(self, closed: AnyJaxpr, args: Sequence[jax.Array]) -> list[Any]:
        """Returns the results of the update, a closed jaxpr."""
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        has_matrices = any(contains(eqn, computes_with_matrices) for eqn in jaxpr.eqns)
        if not has_matrices or [x.shape for x in args] != self._shapes:
            return jaxprs.evaluate(closed, args, opens=lambda eqn: False)
        closed = jaxprs.without_calls(closed)
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        specs = known_specs(jaxpr, self._specs, self._gatherer.mesh)
        members = filter(None, (self._member(f, specs) for f in find(jaxpr, specs)))
        groups = _groups(jaxpr, [*members])
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        _run(jaxpr, groups, env, self._emit)
        return [jaxprs.read(v, env) for v in jaxpr.outvars]

    def _member(self, function: MatrixFunction, specs: Mapping[Atom, Spec]) -> _Member | None:
        """Returns a function with its program for one matrix; None if no operand is sharded along
        its matrices, or one is sharded otherwise or into uneven parts."""
        shapes = [v.aval.shape for v in function.operands]
        own = [specs[v] for v in function.operands]
        program, leading = _program(function), 0
        while all(len(s) > leading + 2 and s[leading] == shapes[0][leading] for s in shapes):
            try:
                program = _of_entry(program, shapes[0][leading], leading, len(shapes))
            except NotByEntry:
                break
            leading += 1
        if any(entry is not None for spec in own for entry in spec[:leading]):
            return None
        shardings = [layout.sharding(self._gatherer.mesh, spec[leading:]) for spec in own]
        if not axes_of(shardings) or len({s.mesh for s in shardings}) > 1:
            return None
        program = _without_leading(program, leading, len(shapes))
        return _Member(function, math.prod(shapes[0][:leading]), leading, shardings, program)

    def _emit(self, members: Sequence[_Member], env: dict[Atom, Any]) -> None:
        """Runs a group of functions, and adds their results to the values in `env`."""
        first, shared = members[0], [env[v] for v in members[0].function.shared]
        mesh: Any = first.shardings[0].mesh
        axes = axes_of(first.shardings) or []
        count = math.prod(mesh.shape[name] for names in axes for name in names)
        total = -(-sum(m.matrices for m in members) // count) * count
        exchanges = []
        for v, sharding in zip(first.function.operands, first.shardings, strict=True):
            shape = v.aval.shape[first.leading :]
            padded = layout.padded_shape(shape, layout.full(sharding.spec, len(shape)), mesh)
            exchanges.append(Exchange(axes, shape, padded, sharding, total))
        ends = [sum(m.matrices for m in members[:i]) for i in range(1, len(members))]

        def run(shards: list[list[jax.Array]], *shared: jax.Array) -> list[list[jax.Array]]:
            own = [e.there(s) for e, s in zip(exchanges, shards, strict=True)]
            outs = jax.vmap(lambda *xs: jaxprs.evaluate(first.program, [*xs, *shared], entry.run))(
                *own
            )
            back = [exchanges[i].back(x) for i, x in zip(first.function.like, outs, strict=True)]
            return [jnp.split(x[: sum(m.matrices for m in members)], ends) for x in back]

        stacks = [
            [
                pad(env[m.function.operands[i]].reshape(-1, *e.shape), (m.matrices, *e.padded))
                for m in members
            ]
            for i, e in enumerate(exchanges)
        ]
        specs = [PartitionSpec(None, *e.sharding.spec) for e in exchanges]
        sent = [
            jax.ShapeDtypeStruct((total, *e.padded), x[0].dtype)
            for e, x in zip(exchanges, stacks, strict=True)
        ]
        results = [specs[i] for i in first.function.like]
        mapped = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, *(PartitionSpec() for _ in shared)),
            out_specs=results,
            check_vma=False,
        )
        with (
            self._gatherer.ledger.place(UPDATE, "each device computes with some of the matrices"),
            self._gatherer.ledger.instead(
                *((EXCHANGE, x) for x in (*sent, *(sent[i] for i in first.function.like)))
            ),
        ):
            outs = mapped(stacks, *shared)
        for i, (stack, at) in enumerate(zip(outs, first.function.like, strict=True)):
            for m, x in zip(members, stack, strict=True):
                v = m.function.results[i]
                env[v] = x[:, *map(slice, exchanges[at].shape)].reshape(v.aval.shape)


def _program(function: MatrixFunction) -> AnyJaxpr:
    """Returns a function as a closed jaxpr of its operands and the shared values."""
    inputs = [*function.operands, *function.shared]

    def run(*args: jax.Array) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        for eqn in function.equations:
            outs = entry.run(eqn, [jaxprs.read(v, env) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] for v in function.results]

    return jax.make_jaxpr(run)(*(jaxprs.like(v.aval) for v in inputs))


def _of_entry(closed: AnyJaxpr, count: int, at: int, operands: int) -> AnyJaxpr:
    """Returns a program for arrays with one entry along dimension `at`, from the program for arrays
    with `count` entries. Its first arguments are the `operands`.

    Raises:
      NotByEntry: The entries are not computed separately.
    """
    avals = [v.aval for v in jaxprs.open_jaxpr(closed)[0].invars]
    shapes = [
        (*aval.shape[:at], 1, *aval.shape[at + 1 :]) if i < operands else aval.shape
        for i, aval in enumerate(avals)
    ]

    def run(*args: jax.Array) -> list[Any]:
        stacks = [Stack(x, at if i < operands else None) for i, x in enumerate(args)]
        outs = Entries(count).run(closed, stacks)
        if any(out.at != at for out in outs):
            raise NotByEntry("a result that all entries have in common")
        return [out.value for out in outs]

    return jax.make_jaxpr(run)(*map(jaxprs.like, avals, shapes))


def _without_leading(closed: AnyJaxpr, leading: int, operands: int) -> AnyJaxpr:
    """Returns a program whose arrays lack the leading dimensions, all of size 1."""
    if leading == 0:
        return closed
    avals = [v.aval for v in jaxprs.open_jaxpr(closed)[0].invars]
    shapes = [a.shape[leading:] if i < operands else a.shape for i, a in enumerate(avals)]

    def run(*args: jax.Array) -> list[Any]:
        outs = jaxprs.evaluate(
            closed, [x.reshape(a.shape) for x, a in zip(args, avals, strict=True)]
        )
        return [x.reshape(x.shape[leading:]) for x in outs]

    return jax.make_jaxpr(run)(*map(jaxprs.like, avals, shapes))


def _groups(jaxpr: Jaxpr, members: Sequence[_Member]) -> list[list[_Member]]:
    """Returns the functions that run together: equal programs on equally sharded matrices, none of
    which computes from the result of another function."""
    computed = {v for m in members for v in m.function.results}
    depth: dict[Atom, int] = {}
    for eqn in jaxpr.eqns:
        before = max((depth.get(v, 0) for v in jaxprs.variables(eqn.invars)), default=0)
        depth.update({v: before + (v in computed) for v in eqn.outvars})
    groups: dict[object, list[_Member]] = {}
    for m in members:
        key = (
            str(m.program),
            m.shardings,
            m.function.shared,
            tuple(m.function.like),
            max(depth.get(v, 0) for v in m.function.operands),
        )
        groups.setdefault(repr(key), []).append(m)
    return [*groups.values()]


def _run(
    jaxpr: Jaxpr,
    groups: Sequence[Sequence[_Member]],
    env: dict[Atom, Any],
    emit: Callable[[Sequence[_Member], dict[Atom, Any]], None],
) -> None:
    """Runs the needed equations in their order, each group once all its operands exist, and
    equations that need a group's results after the group."""
    operands = {v: m.function.operands for g in groups for m in g for v in m.function.results}
    waiting, left = _needed(jaxpr, operands), [*groups]
    while waiting or left:
        remaining = []
        for eqn in waiting:
            if all(v in env for v in jaxprs.variables(eqn.invars)):
                outs = jaxprs.bind_in_context(eqn, [jaxprs.read(v, env) for v in eqn.invars])
                computed = zip(eqn.outvars, outs, strict=True)
                env.update((v, out) for v, out in computed if v not in operands)
            else:
                remaining.append(eqn)
        ready = [g for g in left if all(v in env for m in g for v in m.function.operands)]
        for group in ready:
            emit(group, env)
            left.remove(group)
        waiting = remaining


def _needed(jaxpr: Jaxpr, operands: Mapping[Atom, Sequence[Atom]]) -> list[Equation]:
    """Returns the equations that the results of a program need, in order, where some values are
    computed from `operands` instead of by their equations."""
    graph, needed = graph_of(jaxpr), {}
    todo, seen = jaxprs.variables(jaxpr.outvars), set[Atom]()
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in operands:
            todo += operands[v]
        elif (eqn := graph.producer(v)) is not None:
            needed[graph.place(eqn)] = eqn
            todo += jaxprs.variables(eqn.invars)
    return [needed[place] for place in sorted(needed)]
