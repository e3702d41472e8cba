"""Matrices in the update of a step that updates its state itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.matrices import MatrixUpdate, is_of_matrices, known_specs
from zerojax.graph.search import contains
from zerojax.optim.over_matrices import with_muon_calls
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.trace import marks
from zerojax.trace.updates import find_update
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, PyTree


def with_matrices(
    closed: AnyJaxpr, results: tuple[Parts, PyTree], leaves: Sequence[Leaf], gatherer: Gatherer
) -> AnyJaxpr:
    """Returns a traced step with the matrices of its update distributed over the devices, see
    :mod:`zerojax.collectives.matrices`.

    The updates of an optimizer that zerojax wraps are distributed when they are traced. In other
    steps the dataflow shows which equations are the update.

    Args:
      closed: The step's jaxpr, from the state and the batch to ``results``.
      results: The shapes of the step's results.
      leaves: The leaves of ``rest``, which is the state.
      gatherer: Records the collectives; has the devices.
    """
    closed = with_muon_calls(closed)
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    index = jax.tree.unflatten(jax.tree.structure(results), range(len(jaxpr.outvars)))[0]
    state = jax.tree.leaves(index.rest)
    update = find_update(jaxpr, state)
    if update is None or not any(contains(e, is_of_matrices) for e in update.equations):
        return closed
    given: list[Spec | None] = [None] * len(jaxpr.invars)
    for i, leaf in zip(state, leaves, strict=True):
        given[i] = layout.full(leaf.spec, len(leaf.shape))
    known = known_specs(jaxpr, given, gatherer.mesh)
    specs = [known.get(v) for v in update.operands]
    program = jaxpr.replace(
        constvars=[], invars=update.operands, outvars=update.results, eqns=update.equations
    )
    shapes = [v.aval.shape for v in update.operands]
    distribute = MatrixUpdate(gatherer, shapes, specs)

    def run(*args: jax.Array) -> list[Any]:
        given = (*jaxprs.open_jaxpr(closed)[1], *args)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        _evaluate(update.earlier, env)
        shards = [
            env[v] if spec is None else marks.mark(env[v], marks.SHARD)
            for v, spec in zip(update.operands, specs, strict=True)
        ]
        with jaxprs.traced_where(update.equations[0]):  # a line of the optimizer
            outs = distribute(program, shards)
        env.update(zip(update.results, outs, strict=True))
        _evaluate(update.later, env)
        return [jaxprs.read(v, env) for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(*(jaxprs.like(v.aval) for v in jaxpr.invars))


def _evaluate(equations: Sequence[Equation], env: dict[Atom, Any]) -> None:
    """Runs equations on the values in `env`, and adds their results."""
    for eqn in equations:
        with jaxprs.traced_where(eqn):
            outs = jaxprs.bind(eqn, [jaxprs.read(v, env) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
