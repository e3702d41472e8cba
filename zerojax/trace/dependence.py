"""The parameters that a step has just updated, and what it computes from them."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from zerojax.graph.analysis import Analysis
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import CAST, LABELS
from zerojax.graph.reach import DEPENDS
from zerojax.train_state.results import beside
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, PyTree

_COPIES = LABELS | {CAST}


def _computed(eqn: Equation, operands: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    return [frozenset[int]()] * len(eqn.outvars)


_UNCHANGED: Analysis[frozenset[int]] = Analysis(
    frozenset(), frozenset.union, _computed, control=False
)
"""Forward analysis of the position of the argument that a value is; empty for a computed value."""
# What a loop or a branch returns is the value of one iteration, or of one branch.
_UNCHANGED.rule("scan", "while", "cond", "shard_map")(_computed)


@_UNCHANGED.rule(*LABELS)
def _(eqn: Equation, operands: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    return [operands[0]]


def check_late(jaxpr: Jaxpr, given: Parts, results: PyTree, name: str) -> None:
    """Refuses a step that uses its new parameters: an update that comes after the step, sub-group
    by sub-group, has not computed them yet.

    Args:
      jaxpr: The open jaxpr of the step, with :class:`zerojax.step.view.View` as the optimizer state
        in ``given``.
      given: The step's state, whose leaves are the first arguments of the jaxpr.
      results: The shapes of the step's results: the new state, and everything else.
      name: The name of the step.

    Raises:
      NotImplementedError: The message names the results that depend on the new parameters, or the
        optimizer state that the step changes, and the remedy.
    """
    numbered = jax.tree.unflatten(
        jax.tree.structure(given), list(range(len(jax.tree.leaves(given))))
    )
    updates = [jaxpr.invars[i] for i in jax.tree.leaves(numbered.opt_state.updates)]
    params = [jaxpr.invars[i] for i in jax.tree.leaves(numbered.params)]
    is_late = DEPENDS.forward(jaxpr, [v in updates for v in jaxpr.invars]).ends
    lateness = jax.tree.unflatten(jax.tree.structure(results), is_late)
    outs = jax.tree.unflatten(jax.tree.structure(results), list(jaxpr.outvars))
    source = unchanged(jaxpr)
    index = jax.tree.unflatten(jax.tree.structure(results), range(len(source)))[0].opt_state.inner
    inner_leaves = jax.tree_util.tree_leaves_with_path(numbered.opt_state.inner)
    for (path, i), result in zip(inner_leaves, jax.tree.leaves(index), strict=True):
        if source[result] != i:
            raise NotImplementedError(
                f"{name} changes state.opt_state{jax.tree_util.keystr(path)}, and under offload "
                "the update follows the step. Change it between two steps, or train without "
                "offload."
            )
    late = [*_named("state", lateness[0].rest), *_named("its result", beside(lateness[1]))]
    new = zip(jax.tree.leaves(outs[0].params), params, updates, strict=True)
    late += [] if all(_is_sum(jaxpr, *each) for each in new) else ["state.params"]
    if late:
        raise NotImplementedError(
            f"{name} computes {', '.join(late[:3])} from the parameters it has just updated, and "
            "under offload the update follows the step. Compute it from the state that the step "
            "returns, or with the parameters before the update."
        )


def with_updated_copies(closed: AnyJaxpr, given: Parts, results: PyTree) -> AnyJaxpr:
    """Replaces the step's own sums of parameters and updates by the equal sums of its optimizer.

    A step with a copy of its parameters in the compute dtype returns the updated copy in the view
    of its optimizer, too.

    Args:
      closed: The step's jaxpr and its constants.
      given: The step's state, with :class:`zerojax.step.view.View` as the optimizer state; its
        leaves are the first arguments of the jaxpr.
      results: The shapes of the step's results: the new state, and everything else.
    """
    jaxpr = jaxprs.open_jaxpr(closed)[0]
    outs = list(jaxpr.outvars)
    before, after = (
        jax.tree.unflatten(jax.tree.structure(tree), range(len(jax.tree.leaves(tree))))
        for tree in (given, results[0])
    )
    copies = [jax.tree.leaves(x.opt_state.compute) for x in (before, after)]
    params = [jax.tree.leaves(x.params) for x in (before, after)]
    for old, old_copy, new, new_copy in zip(
        params[0], copies[0], params[1], copies[1], strict=False
    ):
        same = {id(jaxpr.invars[old_copy]): id(jaxpr.invars[old])}
        own, of_copy = (
            {same.get(term, term) for term in _terms(jaxpr, outs[i])} for i in (new, new_copy)
        )
        # A sum in a wider dtype than the copy's is another number.
        if own and own == of_copy and outs[new].aval == outs[new_copy].aval:
            # As one variable, both need no comparison, for which the old and the new copy would
            # exist during the update.
            outs[new] = outs[new_copy]
    return jaxprs.with_body(closed, jaxpr.replace(outvars=outs))


def _terms(jaxpr: Jaxpr, v: Atom) -> set[int]:
    """Returns the identities of the two variables whose sum ``v`` is, in any dtype; else none."""
    graph = graph_of(jaxpr)
    eqn = graph.producer(graph.origin(v, _COPIES))
    if eqn is None or eqn.primitive.name != "add":
        return set()
    return {id(graph.origin(term, _COPIES)) for term in eqn.invars}


def _named(prefix: str, lateness: PyTree) -> list[str]:
    """Returns the paths of the leaves of a tree that are late."""
    leaves = jax.tree_util.tree_leaves_with_path(lateness)
    return [f"{prefix}{jax.tree_util.keystr(path)}" for path, late in leaves if late]


def unchanged(jaxpr: Jaxpr) -> Sequence[int | None]:
    """Returns, for each result of a jaxpr, the position of the argument that it is, unchanged; None
    for a result that an equation computes."""
    facts = _UNCHANGED.forward(jaxpr, [frozenset({i}) for i in range(len(jaxpr.invars))]).ends
    return [next(iter(fact)) if len(fact) == 1 else None for fact in facts]


def _is_sum(jaxpr: Jaxpr, out: Atom, one: Atom | None, other: Atom | None) -> bool:
    """Returns whether a result of a jaxpr is only the sum of two of its arguments."""
    graph = graph_of(jaxpr)
    # optax.apply_updates casts the sum back to the parameter's dtype.
    v = graph.origin(out, _COPIES)
    if (eqn := graph.producer(v)) is None:
        return False
    if eqn.primitive in jaxprs.CALLS:
        inner = jaxprs.open_jaxpr(jaxprs.called_jaxpr(eqn))[0]
        # By identity: a literal has no hash.
        operand_ids = [id(graph.origin(v, _COPIES)) for v in eqn.invars]
        inner_args = dict(zip(operand_ids, inner.invars, strict=True))
        terms = inner_args.get(id(one)), inner_args.get(id(other))
        return None not in terms and _is_sum(inner, inner.outvars[eqn.outvars.index(v)], *terms)
    return _terms(jaxpr, v) == {id(one), id(other)}
