"""An optimizer's update with its functions of matrices distributed over the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.matrices.find import computes_with_matrices, find, known_specs
from zerojax.collectives.matrices.groups import Group, Member, grouped
from zerojax.graph.def_use import graph_of
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.state_sharding import Plan
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr


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
        mesh = self._gatherer.mesh
        specs = known_specs(jaxpr, self._specs, mesh)
        members = (Member.of(function, specs, mesh) for function in find(jaxpr, specs))
        groups = grouped(jaxpr, [m for m in members if m is not None])
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        _run(jaxpr, groups, env, self._gatherer.ledger)
        return [jaxprs.read(v, env) for v in jaxpr.outvars]


def _run(jaxpr: Jaxpr, groups: Sequence[Group], env: dict[Atom, Any], ledger: Ledger) -> None:
    """Runs the needed equations in their order, each group once all its operands exist, and
    equations that need a group's results after the group."""
    group_of = {v: group for group in groups for v in group.results}
    waiting, left = _needed(jaxpr, group_of), [*groups]
    while waiting or left:
        remaining = []
        for eqn in waiting:
            if all(v in env for v in jaxprs.variables(eqn.invars)):
                outs = jaxprs.bind_in_context(eqn, [jaxprs.read(v, env) for v in eqn.invars])
                computed = zip(eqn.outvars, outs, strict=True)
                env.update((v, out) for v, out in computed if v not in group_of)
            else:
                remaining.append(eqn)
        for group in [group for group in left if all(v in env for v in group.operands)]:
            env.update(group.run(env, ledger))
            left.remove(group)
        waiting = remaining


def _needed(jaxpr: Jaxpr, group_of: Mapping[Atom, Group]) -> list[Equation]:
    """Returns the equations that the results of a program need, in order, without those that only a
    group's results need."""
    graph, needed = graph_of(jaxpr), {}
    todo, seen = jaxprs.variables(jaxpr.outvars), set[Atom]()
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in group_of:
            todo += group_of[v].operands
        elif (eqn := graph.producer(v)) is not None:
            needed[graph.place(eqn)] = eqn
            todo += jaxprs.variables(eqn.invars)
    return [needed[place] for place in sorted(needed)]
