"""Decisions on a loop over stacks, taken before its first iteration runs on shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from zerojax.collectives import ahead, behind, held
from zerojax.collectives.gathering import Gatherer, Scope, is_sharded
from zerojax.collectives.loops import Sums
from zerojax.collectives.partial_sums import RowSum
from zerojax.collectives.shard import Shard
from zerojax.collectives.widening import narrowest
from zerojax.graph.regions import regions
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import is_small
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


@dataclass(frozen=True, eq=False)
class LoopDecisions:
    """The decisions on one loop. Positions count from the first operand, or result, of a kind:
    constants, carried values, stacks.

    Attributes:
      sums: The carried values that are added up on each device and reduced after the loop.
      carried: Positions of the other carried values.
      updated: By position of a carried value, the spec of its shard, for state that an iteration
        changes: the loop carries shards, and each iteration gathers the state that it needs.
      held: Positions of the constants that are gathered before the loop.
      gathered: Positions of the stacks that are gathered before the loop: a stack that is sharded
        along its layers cannot be gathered layer by layer.
      ahead: By position of a stack, the dtype in which its layers are gathered one iteration ahead.
      filled: By position of a stack, its sharded dimension, for those that the loop gathers and
        stacks for later loops.
      behind: By position of a stack of gradients, the sum that is reduced one iteration later.
      layer: Bytes of the parameters gathered ahead, or of the gradients reduced one iteration
        later, whichever are more.
      of_layer: Whether an iteration is one layer, whose gradients are stacked.
      want: For each result of an iteration the spec of its shard if it is a gradient; None for
        others.
    """

    sums: Sums
    carried: Sequence[int]
    updated: Mapping[int, Spec]
    held: set[int]
    gathered: set[int]
    ahead: Mapping[int, jnp.dtype]
    filled: Mapping[int, int]
    behind: Mapping[int, RowSum]
    layer: int
    of_layer: bool
    want: Sequence[Spec | None]

    @property
    def peels(self) -> bool:
        """True if the first and the last iteration run outside the loop, see
        :mod:`zerojax.collectives.iterations`."""
        return bool(self.ahead or self.behind)


def decide(
    eqn: Equation,
    values: Sequence[object],
    want: Sequence[Spec | None],
    gatherer: Gatherer,
    scope: Scope,
    *,
    updated: Mapping[int, Spec],
    prefetch: bool,
) -> LoopDecisions:
    """Decides how a loop runs on shards.

    Args:
      eqn: The scan.
      values: Its operands, some of them a :class:`Shard`.
      want: For each result the spec of an entry's shard if it is a gradient; None for others.
      gatherer: Gathers parameters and reduces gradients.
      scope: The scope that contains the loop.
      updated: See :func:`find_updated`.
      prefetch: Whether the loop gathers parameters one iteration ahead.
    """
    a, n = jaxprs.scan_counts(eqn)
    consts, xs = values[:a], values[a + n :]
    sums = Sums(eqn, want[:n], gatherer.thresholds.held)
    carried = [i for i in range(n) if i not in sums.terms]
    # A loop that carries other gradients runs over micro-batches, and each iteration gathers.
    remaining = [i for i in carried if i not in sums.stacks and i not in updated]
    gradient_specs = [spec for i in remaining if (spec := want[i]) is not None]
    over_micro_batches = any(is_sharded(spec, gatherer.axis) for spec in gradient_specs)
    jaxpr = jaxprs.param(eqn, "jaxpr")
    gathered = {i for i, x in enumerate(xs) if isinstance(x, Shard) and x.spec[0]}
    read = [None if i in gathered else narrowest(x) for i, x in enumerate(xs)]
    has_stacks = any(want[n:]) or bool(sums.stacks)
    prefetched = ahead.decide(eqn, read, gatherer, scope.row_dims, gathers=prefetch)
    deferred = behind.decide(eqn, want[n:], gatherer, scope.row_dims) if scope.behind else {}
    stacks = [v.aval for v in eqn.outvars[n:]]
    stacked_bytes = (
        sum(eqn.invars[a + n + i].aval.size * d.itemsize for i, d in prefetched.items()),
        sum(stacks[i].size * stacks[i].dtype.itemsize for i in deferred),
    )
    return LoopDecisions(
        sums=sums,
        carried=carried,
        updated=updated,
        held=set()
        if over_micro_batches
        else held.decide(jaxpr, consts, gatherer.mesh, gatherer.thresholds.held),
        gathered=gathered,
        ahead=prefetched,
        filled={
            i: layout.dimensions(x.spec, gatherer.axis)[0]
            for i, x in enumerate(xs)
            if i not in gathered and isinstance(x, Shard) and x.gathering.by_loop
        },
        behind=deferred,
        layer=max(stacked_bytes) // jaxprs.param(eqn, "length"),
        of_layer=has_stacks and not any(want[i] for i in range(n) if i not in sums.stacks),
        want=[*(updated.get(i, want[i]) for i in carried), *want[n:], *(None for _ in sums.roots)],
    )


def trains(eqn: Equation) -> bool:
    """Returns whether a loop or a choice contains a complete backward pass."""
    return not jaxprs.is_transposed(eqn) and contains(eqn, jaxprs.is_transposed)


def find_updated(eqn: Equation, values: Sequence[object], gatherer: Gatherer) -> dict[int, Spec]:
    """Returns the specs of the large shards that a loop carries and changes, by position among the
    carried values.

    Args:
      eqn: The scan or while loop.
      values: Its operands, some of them a :class:`Shard`.
      gatherer: Gathers parameters.
    """
    axis, small = gatherer.axis, gatherer.thresholds.small
    *_, body = regions(eqn)
    specs = {}
    for i, (result, argument) in enumerate(body.carries):
        x = values[body.operands[argument]]
        if (
            isinstance(x, Shard)
            and is_sharded(x.spec, axis)
            and not x.gathering.host
            and not is_small(x.value.shape, x.spec, axis, small)
            and body.jaxpr.outvars[result] is not body.jaxpr.invars[argument]
        ):
            specs[i] = x.spec
    return specs
