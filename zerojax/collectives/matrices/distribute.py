"""An optimizer's update with its functions of matrices distributed over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.matrices.find import computes_with_matrices, find, known_specs
from zerojax.collectives.matrices.groups import Member, grouped
from zerojax.graph.def_use import graph_of
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.state_sharding import Plan
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Jaxpr
from zerojax.xla.unused import without_unused


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
        # An effect keeps its place among the equations.
        if not has_matrices or jaxpr.effects or [x.shape for x in args] != self._shapes:
            return jaxprs.evaluate(closed, args, opens=lambda eqn: False)
        jaxpr, consts = jaxprs.open_jaxpr(jaxprs.without_calls(closed))
        jaxpr = without_unused(jaxpr, lambda eqn: False)
        mesh = self._gatherer.mesh
        specs = known_specs(jaxpr, self._specs, mesh)
        members = (Member.of(function, specs, mesh) for function in find(jaxpr, specs))
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        _run(jaxpr, [m for m in members if m is not None], env, self._gatherer.ledger)
        return [jaxprs.read(v, env) for v in jaxpr.outvars]


def _run(jaxpr: Jaxpr, members: Sequence[Member], env: dict[Atom, Any], ledger: Ledger) -> None:
    """Runs the needed equations in their order, the functions once all their operands exist, equal
    ones together, and equations that need a function's results after the function."""
    results = {v for m in members for v in m.function.results}
    targets = [*jaxpr.outvars, *(v for m in members for v in m.operands)]
    equations, _ = graph_of(jaxpr).backward_slice(targets, results.__contains__)
    left = [*members]
    while True:
        waiting = []
        for eqn in equations:
            if all(v in env for v in jaxprs.variables(eqn.invars)):
                outs = jaxprs.bind_in_context(eqn, [jaxprs.read(v, env) for v in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
            else:
                waiting.append(eqn)
        ready = [m for m in left if all(v in env for v in m.operands)]
        if not ready:
            return
        for group in grouped(ready):
            env.update(group.run(env, ledger))
        equations, left = waiting, [m for m in left if m not in ready]
