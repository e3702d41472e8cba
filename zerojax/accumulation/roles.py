"""Roles of a step's arguments and results, and the treatment of each result by accumulation."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import OF_ALL_ROWS, REMEDIES, UNDIVIDED
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.kinds import FIXED, RowKind
from zerojax.accumulation.split import ByPart
from zerojax.distributed import log
from zerojax.graph.analysis import Analysis as Dataflow
from zerojax.train_state.pytree import form_of
from zerojax.train_state.results import beside
from zerojax.train_state.state_parts import Parts
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation, PyTree

_STATE_REMEDY = (
    "Keep a sum or a mean over rows in the state. Pass an array with a row for each of the batch, "
    "such as a hidden state, as an argument of the batch, and return it: see batch_argnums."
)
RESULTS_REMEDY = (
    "Return the sums or means that it follows from, or a number for each row, and finish the "
    "computation outside the step; or " + UNDIVIDED
)


@dataclass(frozen=True)
class Roles:
    """Positions among the flat arguments and results of a step.

    Attributes:
      name: The name of the step.
      learned: Arguments that training changes: parameters, optimizer state, other state.
      batch: Arguments that are leaves of the batch.
      state, rest: Results that are the state after the step, and those of them that are neither
        parameters nor optimizer state nor the counter; the state's arguments have the same
        positions.
      paths: The name of each result, for messages.
      as_batch: Results that come back in the form of an argument of the batch, [rows, ...].
    """

    name: str
    learned: frozenset[int]
    batch: Sequence[int]
    state: Sequence[int]
    rest: Sequence[int]
    paths: Sequence[str]
    as_batch: frozenset[int] = frozenset()

    def kinds(self, flat: Flat) -> list[RowKind]:
        """Returns the kind of each argument."""
        batch = {*self.batch}
        return [
            RowKind("rows", dim=0, outer=1)
            if i in batch and v.aval.ndim
            else FIXED.but(learned=i in self.learned)
            for i, v in enumerate(flat.invars)
        ]


def roles_of(
    name: str,
    given: Parts,
    batch: PyTree,
    results: tuple[Parts, PyTree],
    arguments: Sequence[PyTree] = (),
) -> Roles:
    """Returns the roles in a step from ``(given, batch)`` to ``results``, the new state and
    everything else.

    Args:
      arguments: The arguments of which the batch consists, if there are several. A result with the
        tree, shapes and dtypes of one of them, such as a hidden state, comes back in its form.
    """
    ends = list(itertools.accumulate(len(jax.tree.leaves(part)) for part in given))
    rest = range(ends[2], ends[3])
    fields = {**results[0]._asdict(), **dict(sorted(results[0].rest.items()))}
    del fields["rest"]
    paths = [
        (field if field.startswith("state") else f"state.{field}") + jax.tree_util.keystr(path)
        for field, part in fields.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(part)
    ]
    paths += [
        f"its result{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_leaves_with_path(beside(results[1]))
    ]
    return Roles(
        name=name,
        # Without the counter: what follows from it and the batch alone may be computed first.
        learned=frozenset([*range(ends[1]), *rest]),
        batch=range(ends[3], ends[3] + len(jax.tree.leaves(batch))),
        state=range(ends[3]),
        rest=rest,
        paths=paths,
        as_batch=frozenset(ends[3] + i for i in _like(results[1], [*map(form_of, arguments)])),
    )


def _like(results: PyTree, forms: Sequence[object]) -> Iterator[int]:
    """Yields the positions of the arrays of results, or of their parts, that have one of these
    forms."""
    nodes = jax.tree.leaves(results, is_leaf=lambda node: form_of(node) in forms)
    sizes = [len(jax.tree.leaves(node)) for node in nodes]
    for node, size, end in zip(nodes, sizes, itertools.accumulate(sizes), strict=True):
        if form_of(node) in forms:
            yield from range(end - size, end)


def carried(flat: Flat, analysis: Analysis, rest: Sequence[int]) -> dict[int, Atom]:
    """Finds the state that each micro-batch passes to the next: state that only the batch changes
    (batch statistics), and keys. Returns the variable that holds each array of that state, by the
    array's position among the arguments; ``rest`` as in :class:`Roles`."""
    carry: dict[int, Atom] = {}
    for i in rest:
        given, out = flat.invars[i], flat.outvars[i]
        if isinstance(out, core.Literal) or out is given:
            continue
        kind = analysis.kind(out).added
        # A key that draws nothing in the batch's shape is the same for all micro-batches.
        key = bool(analysis.drawn) and _feeds_noise(flat, given)
        if kind.name == "own" or (kind.name == "fixed" and key):
            carry[i] = out
        elif kind.guarded:
            new = [v for v in jaxprs.variables(kind.guarded) if v is not given]
            own = [v for v in new if analysis.kind(v).name == "own"]
            if own or (key and len(new) == 1):
                carry[i] = (own or new)[0]
    return carry


def per_micro_batch(
    flat: Flat, analysis: Analysis, roles: Roles, carry: Mapping[int, Atom], k: int
) -> list[ByPart]:
    """Returns the results that each micro-batch computes.

    Raises:
      ValueError: The state, or a result, would not be that of the global batch.
    """
    passed = {*carry.values()}
    state = {*roles.state}
    stacked: list[ByPart] = []

    # Optimizer state last: it depends on the arrays to update, whose names say more in an error.
    opt_state = [i for i in roles.state if roles.paths[i].startswith("state.opt_state")]
    for i in sorted(range(len(flat.outvars)), key={*opt_state}.__contains__):
        v = flat.outvars[i]
        kind = FIXED if isinstance(v, core.Literal) else analysis.kind(v).added
        problem = None
        if kind.name == "mixed":
            assert kind.problem is not None
            why = kind.problem.why
            remedy = REMEDIES.get(why, UNDIVIDED.capitalize())
            if i not in state and why in OF_ALL_ROWS:
                remedy = RESULTS_REMEDY
            problem = (
                f"depends on {kind.problem.where}, which {why}. Micro-batches would give other "
                f"numbers than the global batch. {remedy}"
            )
        elif i in state:
            if kind.rows or (kind.name == "own" and v not in passed):
                problem = f"has rows of the batch in it. {_STATE_REMEDY}"
        elif kind.index:
            problem = (
                "is computed from row numbers, which a micro-batch does not know. Make them part "
                "of the batch."
            )
        elif kind.rows or kind.name == "own":
            averaged = kind.name == "own" and not v.aval.ndim
            if averaged and not jnp.issubdtype(v.aval.dtype, jnp.inexact):
                problem = (
                    f"({v.aval.dtype}) differs between micro-batches and cannot be averaged. "
                    "Return it as a float, or for each row."
                )
            stacked.append(ByPart(i, kind, averaged))
        if problem:
            raise ValueError(
                f"{roles.name} cannot be accumulated over {k} micro-batches: {roles.paths[i]} "
                f"{problem}"
            )
    return stacked


def refuse_statistics(roles: Roles, analysis: Analysis, flat: Flat, k: int) -> None:
    """Refuses state that follows from statistics of each micro-batch's own rows.

    Raises:
      ValueError: Names the state, the line and the remedies.
    """
    if not analysis.owners:
        return
    own = (i for i in roles.rest if analysis.kind(flat.outvars[i]).name == "own")
    first = next(own, roles.rest[0])
    raise ValueError(
        f"{roles.name} cannot be accumulated over {k} micro-batches: {roles.paths[first]} keeps "
        f"statistics that each row is computed with ({_some(analysis.owners)}), and those of a "
        "micro-batch differ from those of the global batch. Use LayerNorm or GroupNorm; or "
        "pass zerojax.zero(..., accumulate_statistics=True) to normalise each micro-batch by "
        f"its own, as PyTorch does; or {UNDIVIDED}"
    )


def warn_of_differences(name: str, analysis: Analysis, k: int) -> None:
    """Logs which values cannot be the same as on the global batch."""
    if analysis.owners:
        log.warning(
            "%s: each of the %d micro-batches computes statistics of its own rows (%s), which "
            "differ from those of the global batch.", name, k, _some(analysis.owners),
        )  # fmt: skip
    if analysis.drawn:
        log.warning(
            "%s: noise in the batch's shape (%s) is drawn anew for each of the %d micro-batches, "
            "and differs from that of the global batch. To have the same noise, make it, or a key "
            "for each row, part of the batch.", name, _some(analysis.drawn), k,
        )  # fmt: skip


def _some(places: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(places))
    return ", ".join(distinct[:2]) + (f" and {len(distinct) - 2} more" if len(distinct) > 2 else "")


def _feeds_noise(flat: Flat, start: Atom) -> bool:
    """Returns whether an argument is a key, or integers that keys are derived from."""
    dtype = start.aval.dtype
    key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # A raw key, from jax.random.PRNGKey, is an array like any other of its dtype.
    return key or (dtype == jnp.uint32 and _reaches_noise(flat, start))


def _reaches_noise(flat: Any, start: Atom) -> bool:
    """Returns whether a primitive that draws random numbers depends on an argument."""
    draws: list[Equation] = []

    def depend(eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        if any(operands) and eqn.primitive.name.startswith(("random_", "threefry")):
            draws.append(eqn)
        return [any(operands)] * len(eqn.outvars)

    Dataflow(False, operator.or_, depend).forward(flat, [v is start for v in flat.invars])
    return bool(draws)
