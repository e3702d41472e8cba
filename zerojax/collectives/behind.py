"""What a loop reduces one iteration behind: the gradients of its layers.

A loop over layers makes each layer's gradients at the end of an iteration, and a reduce-scatter
there would be waited for. So each device carries its own part of every sum into the next iteration,
and the parts are reduced while that one computes. One layer of gradients more is held; and one more
is reduced, since the first iteration has nothing to reduce yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import order, propagate
from zerojax.collectives.ahead import LEAST
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.partial_sums import PartialSum, RowSum, links, row_sum_of, total
from zerojax.collectives.reduction import pinned
from zerojax.collectives.shard import ReducedGradient
from zerojax.graph.graph import graph_of
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs


class Behind:
    """The stacks of gradients that a loop makes, some of them one iteration behind.

    Args:
      eqn: The scan.
      want: For each stack that it makes, the spec of an entry's shard; None for no gradient.
      behind: By position of a stack, the sum that is reduced one iteration later, see
        :func:`decide`.
      gatherer: Reduces gradients.
    """

    def __init__(
        self,
        eqn: Any,
        want: Sequence[Spec | None],
        behind: Mapping[int, RowSum],
        gatherer: Gatherer,
    ) -> None:
        self._gatherer, self._length = gatherer, jaxprs.param(eqn, "length")
        self._reverse = jaxprs.param(eqn, "reverse")
        self._stacks = eqn.outvars[len(eqn.outvars) - len(want) :]
        self._want, self._behind = want, behind
        self._made: set[int] = set()  # those that were made so

    @property
    def row_sums(self) -> dict[Any, RowSum]:
        """By variable, what makes the partial sums."""
        return {each.eqn.outvars[0]: each for each in self._behind.values()}

    def order(self) -> tuple[jax.Array, jax.Array] | None:
        """int [length] each, for each iteration the one that came before it, its own for the first,
        and its own. None where nothing is reduced behind."""
        own, step = jnp.arange(self._length), 1 if self._reverse else -1
        return (jnp.clip(own + step, 0, self._length - 1), own) if self._behind else None

    def first(self) -> list[tuple[jax.Array, jax.Array]]:
        """What the first iteration is given: partial sums of zero, and empty stacks of shards."""
        found = []
        for i, row_sum in self._behind.items():
            aval = self._stacks[i].aval
            shape, dtype = row_sum.shape(self._gatherer), row_sum.eqn.outvars[0].aval.dtype
            found.append(
                (pinned(jnp.zeros(shape, dtype), self._gatherer), jnp.zeros(aval.shape, aval.dtype))
            )
        return found

    def hold(
        self, given: list[tuple[jax.Array, jax.Array]], whole: jax.Array | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """What an iteration is given, the smallest parts not before ``whole``: XLA reduces all of a
        layer's together."""
        if whole is None or not given:
            return given
        at = min(range(len(given)), key=lambda i: given[i][0].size)
        (held,) = order.hold_largest([given[at][0]], whole)
        return [
            (pinned(held, self._gatherer), stack) if i == at else (parts, stack)
            for i, (parts, stack) in enumerate(given)
        ]

    def reduced(self, given: Sequence[tuple[jax.Array, jax.Array]]) -> list[ReducedGradient]:
        """The gradients of the iteration before."""
        return [
            ReducedGradient(
                total(PartialSum(parts, p, p.links), self._gatherer), self._want[i] or ()
            )
            for (i, p), (parts, _) in zip(self._behind.items(), given, strict=True)
        ]

    def passed(
        self,
        given: Sequence[tuple[jax.Array, jax.Array]],
        reduced: Sequence[ReducedGradient],
        outs: Sequence[Any],
        at: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[list[tuple[jax.Array, jax.Array]], list[Any]]:
        """What an iteration passes on; and its results ``outs``, of which the stacks' come last,
        without what is behind."""
        passed, left, first = [], list(outs), len(outs) - len(self._stacks)
        for i, (parts, stack), before in zip(self._behind, given, reduced, strict=True):
            assert at is not None
            y, left[first + i] = left[first + i], None
            if isinstance(y, PartialSum):
                self._made.add(i)
                passed.append((y.value, _put(stack, before.value, at[0])))
            else:
                passed.append((parts, _put(stack, y, at[1])))
        return passed, [total(x, self._gatherer) if isinstance(x, PartialSum) else x for x in left]

    def finished(self, given: Sequence[tuple[jax.Array, jax.Array]]) -> dict[int, jax.Array]:
        """The stacks, by position, once the last iteration's parts are reduced."""
        last = 0 if self._reverse else self._length - 1
        reduced = self.reduced(given)
        return {
            i: _put(stack, x.value, last) if i in self._made else stack
            for i, (_, stack), x in zip(self._behind, given, reduced, strict=True)
        }


def decide(
    eqn: Any, want: Sequence[Spec | None], gatherer: Gatherer, rows: int | None
) -> dict[int, RowSum]:
    """The stacks of gradients that a scan reduces one iteration later, by position: the sum.

    Args:
      eqn: The scan.
      want: See :class:`Behind`.
      gatherer: Reduces gradients.
      rows: Of a batch; None where nothing is to be reduced later.
    """
    if rows is None or not gatherer.alone or jaxprs.param(eqn, "length") < LEAST:
        return {}
    body, _ = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))
    results = body.outvars[len(body.outvars) - len(want) :]
    sums = {
        i: _row_sum(body, v, spec, gatherer, rows)
        for i, (v, spec) in enumerate(zip(results, want, strict=True))
        if spec is not None
    }
    return {i: row_sum for i, row_sum in sums.items() if row_sum is not None}


def _put(stack: jax.Array, entry: Any, at: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, entry, at, 0)


def _row_sum(
    jaxpr: Any,
    v: Any,
    spec: Spec | None,
    gatherer: Gatherer,
    rows: int,
    after: tuple[Any, ...] = (),
) -> RowSum | None:
    """The sum over rows that produces ``v``, perhaps in calls, and is used for nothing else; None
    where none does, or where not every device could reduce a piece of its rows."""
    graph = graph_of(jaxpr)
    while spec is not None and graph.times_used(v) == 1 and (eqn := graph.producer(v)) is not None:
        if eqn.primitive in jaxprs.CALLS:
            (inner,) = jaxprs.bodies(eqn)
            v = inner.outvars[eqn.outvars.index(v)]
            return _row_sum(inner, v, spec, gatherer, rows, after)
        if not links(eqn):
            return row_sum_of(eqn, rows, spec, gatherer, after)
        after = (eqn, *after)
        if propagate.reversible(eqn):
            spec = propagate.backward(eqn, spec, gatherer.mesh)
        (v,) = eqn.invars
    return None
