"""An optimizer's update with its functions of matrices distributed over the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import PartitionSpec

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.matrices.find import computes_with_matrices, find, known_specs
from zerojax.collectives.matrices.groups import Member, grouped
from zerojax.distributed import log
from zerojax.graph.def_use import graph_of
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.state_sharding import Plan
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr
from zerojax.xla.unused import without_unused


class MatrixUpdate:
    """Runs an optimizer's update on shards.

    Equal functions of matrices run on a stack, of which each device has some matrices; the other
    equations run as they are. If K matrices do not divide among N devices, the stack is filled with
    copies of its first ones, so that each device computes with K / N matrices, rounded up. An
    all-to-all brings each operand there, another brings the results back to the shards.

    The branches of a ``cond`` that updates several parameters (``optax.MultiSteps``,
    ``optax.apply_if_finite``) are updates themselves.

    Functions that read matrices which no axis shards, that mix several parameters, or that are of a
    form that :mod:`zerojax.collectives.matrices.find` does not know run as they are.

    Args:
      gatherer: Records the collectives; has the devices.
      shapes, specs: The shapes and the specs of the update's arguments, flat; None for an unknown
        spec.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[Spec | None],
    ) -> None:
        self._gatherer, self._shapes, self._specs = gatherer, shapes, specs
        self._warned = False

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
        if [x.shape for x in args] != self._shapes:
            return jaxprs.evaluate(closed, args, opens=lambda eqn: False)
        return self._program(closed, args, self._specs)

    def _program(
        self, closed: AnyJaxpr, args: Sequence[jax.Array], given: Sequence[Spec | None]
    ) -> list[Any]:
        """Runs an update, or a branch of one, on arguments with known or unknown specs."""
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        has_matrices = any(contains(eqn, computes_with_matrices) for eqn in jaxpr.eqns)
        # An effect keeps its place among the equations.
        if not has_matrices or jaxpr.effects:
            return jaxprs.evaluate(closed, args, opens=lambda eqn: False)
        jaxpr, consts = jaxprs.open_jaxpr(jaxprs.without_calls(closed))
        jaxpr = without_unused(jaxpr, lambda eqn: False)
        specs = known_specs(jaxpr, given, self._gatherer.mesh)
        found = (Member.of(function, specs, self._gatherer.mesh) for function in find(jaxpr, specs))
        members = [m for m in found if m is not None]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        self._warn_of_gathered(jaxpr, members, specs)
        self._run(jaxpr, members, env, specs)
        return [jaxprs.read(v, env) for v in jaxpr.outvars]

    def _warn_of_gathered(
        self, jaxpr: Jaxpr, members: Sequence[Member], specs: Mapping[Atom, Spec]
    ) -> None:
        """Warns, once, of products of sharded matrices that are in no function."""
        inside = {id(eqn) for m in members for eqn in m.function.equations}
        others = [eqn for eqn in jaxpr.eqns if id(eqn) not in inside and not _enters(eqn)]
        shapes = {
            v.aval.shape: None
            for eqn in others
            if contains(eqn, computes_with_matrices)
            for v in jaxprs.variables(eqn.invars)
            if v.aval.ndim > 1 and any(specs.get(v, ()))
        }
        if shapes and not self._warned:
            self._warned = True
            log.warning(
                "the optimizer computes with matrices in a form that zerojax does not distribute: "
                "XLA gathers arrays of shapes %s on each device (docs/precision.md). Let the "
                "arithmetic for a parameter read no other parameter and set no sharding.",
                ", ".join(map(str, shapes)),
            )

    def _run(
        self,
        jaxpr: Jaxpr,
        members: Sequence[Member],
        env: dict[Atom, Any],
        specs: Mapping[Atom, Spec],
    ) -> None:
        """Runs the needed equations in their order, the functions once all their operands exist,
        equal ones together, and equations that need a function's results after the function."""
        results = {v for m in members for v in m.function.results}
        targets = [*jaxpr.outvars, *(v for m in members for v in m.operands)]
        equations, _ = graph_of(jaxpr).backward_slice(targets, results.__contains__)
        left = [*members]
        while True:
            waiting = []
            for eqn in equations:
                if all(v in env for v in jaxprs.variables(eqn.invars)):
                    outs = self._equation(eqn, [jaxprs.read(v, env) for v in eqn.invars], specs)
                    env.update(zip(eqn.outvars, outs, strict=True))
                else:
                    waiting.append(eqn)
            ready = [m for m in left if all(v in env for v in m.operands)]
            if not ready:
                return
            for group in grouped(ready):
                env.update(group.run(env, self._gatherer.ledger))
            equations, left = waiting, [m for m in left if m not in ready]

    def _equation(
        self, eqn: Equation, values: Sequence[Any], specs: Mapping[Atom, Spec]
    ) -> Sequence[Any]:
        """Runs an equation that is not part of a function."""
        if not _enters(eqn):
            return jaxprs.bind_in_context(eqn, values)
        given = [None if isinstance(v, core.Literal) else specs.get(v) for v in eqn.invars[1:]]

        def branch(jaxpr: AnyJaxpr) -> Callable[..., list[jax.Array]]:
            def run(*args: jax.Array) -> list[jax.Array]:
                outs = zip(self._program(jaxpr, args, given), eqn.outvars, strict=True)
                return [jnp.asarray(x, v.aval.dtype) for x, v in outs]  # it may be a literal

            return run

        branches = [branch(jaxpr) for jaxpr in jaxprs.param(eqn, "branches")]
        with jaxprs.context(eqn):
            outs: list[jax.Array] = lax.switch(values[0], branches, *values[1:])
        return outs


def _enters(eqn: Equation) -> bool:
    """Returns whether the branches of an equation may have functions of matrices."""
    return eqn.primitive is prims.cond_p and contains(eqn, computes_with_matrices)
