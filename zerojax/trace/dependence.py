"""What a step makes of the parameters it has just updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from zerojax.graph.graph import graph_of
from zerojax.graph.primitives import LABELS
from zerojax.graph.reach import DEPENDS
from zerojax.trace.changes import origin
from zerojax.train_state.results import beside
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs


def check_late(jaxpr: Any, given: Parts, results: Any, name: str) -> None:
    """Refuses a step that goes on with its new parameters, which an update that comes after the
    step, sub-group by sub-group, has not made yet.

    Args:
      jaxpr: of the step, with :class:`zerojax.step.body.View` as the optimizer state in ``given``.
      given, results: the step's state and batch; the shapes of its results.
      name: of the step.

    Raises:
      NotImplementedError: names what depends on the new parameters, or what the step changes of its
        optimizer's state, and the remedy.
    """
    numbered = jax.tree.unflatten(
        jax.tree.structure(given), list(range(len(jax.tree.leaves(given))))
    )
    updates = [jaxpr.invars[i] for i in jax.tree.leaves(numbered.opt_state.updates)]
    params = [jaxpr.invars[i] for i in jax.tree.leaves(numbered.params)]
    lateness = jax.tree.unflatten(jax.tree.structure(results), depends_on(jaxpr, updates))
    outs = jax.tree.unflatten(jax.tree.structure(results), list(jaxpr.outvars))
    held, kept = numbered.opt_state.inner, jax.tree.leaves(outs[0].opt_state.inner)
    for (path, i), new in zip(jax.tree_util.tree_leaves_with_path(held), kept, strict=True):
        if not is_passed_on(jaxpr, new, jaxpr.invars[i]):
            raise NotImplementedError(
                f"{name} changes state.opt_state{jax.tree_util.keystr(path)}; under offload the "
                "update is made after the step. Change it between two steps, or train without "
                "offload."
            )
    late = [*_named("state", lateness[0].rest), *_named("its result", beside(lateness[1]))]
    new = zip(jax.tree.leaves(outs[0].params), params, updates, strict=True)
    late += [] if all(_is_sum(jaxpr, *each) for each in new) else ["state.params"]
    if late:
        raise NotImplementedError(
            f"{name} computes {', '.join(late[:3])} from the parameters it has just updated; under "
            "offload the update is made after the step, sub-group by sub-group. Compute it from "
            "the state that the step returns, or with the parameters before the update."
        )


def _named(prefix: str, lateness: Any) -> list[str]:
    """Paths of the leaves of a tree that are late."""
    leaves = jax.tree_util.tree_leaves_with_path(lateness)
    return [f"{prefix}{jax.tree_util.keystr(path)}" for path, late in leaves if late]


def depends_on(jaxpr: Any, start: Sequence[Any]) -> Sequence[bool]:
    """For each result of a jaxpr, whether it depends on one of its arguments ``start``."""
    return DEPENDS.forward(jaxpr, [v in start for v in jaxpr.invars]).ends


def is_passed_on(jaxpr: Any, out: Any, argument: Any) -> bool:
    """Whether a result of a jaxpr is one of its arguments, unchanged."""
    v = out
    while v is not argument:
        eqn = graph_of(jaxpr).producer(v)
        if eqn is None:
            return False
        given = [eqn.invars[0]] if eqn.primitive.name in LABELS else []
        if eqn.primitive in jaxprs.CALLS:
            inner = jaxprs.open_jaxpr(jaxprs.called(eqn))[0]
            end = inner.outvars[eqn.outvars.index(v)]
            pairs = zip(eqn.invars, inner.invars, strict=True)
            given = [x for x, start in pairs if is_passed_on(inner, end, start)]
        if not given:
            return False
        v = given[0]
    return True


def _is_sum(jaxpr: Any, out: Any, one: Any, other: Any) -> bool:
    """Whether a result of a jaxpr is the sum of two of its arguments and nothing more."""
    v, eqn = origin(jaxpr, out)
    if eqn is None:
        return False
    # By identity: a literal has no hash.
    made_of = [id(origin(jaxpr, v)[0]) for v in eqn.invars]
    if eqn.primitive in jaxprs.CALLS:
        inner = jaxprs.open_jaxpr(jaxprs.called(eqn))[0]
        at = dict(zip(made_of, inner.invars, strict=True))
        terms = at.get(id(one)), at.get(id(other))
        return None not in terms and _is_sum(inner, inner.outvars[eqn.outvars.index(v)], *terms)
    return eqn.primitive.name == "add" and {*made_of} == {id(one), id(other)}
