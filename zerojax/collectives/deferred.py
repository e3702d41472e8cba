"""Reduction of a loop's gradients one iteration later, and of several blocks' after the last.

A loop over layers computes each layer's gradients at the end of an iteration, where the loop would
wait for a reduce-scatter. So each device carries its partial sums into the next iteration, which
reduces them while it computes; the last iteration's are reduced after the loop. This holds one more
layer of gradients.

Rematerialised blocks outside loops that use one parameter compute a gradient of it each. Each
device adds up its partial sums of them, which are reduced after the last block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import order, propagate
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.partial_sums import PartialSum, RowSum, links, row_sum_of, total
from zerojax.collectives.prefetch import LEAST
from zerojax.collectives.reduction import pin_to_devices
from zerojax.collectives.shard import ReducedGradient
from zerojax.graph.def_use import graph_of
from zerojax.graph.rows import RowDimensions
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import Atom, Equation, Jaxpr

Pending = tuple[jax.Array | None, jax.Array | None]
"""The partial sums of the previous iteration, and the stack of reduced gradients; None before the
first iteration."""


class DeferredReductions:
    """The stacks of gradients that a loop computes, some of them reduced one iteration later.

    Args:
      eqn: The scan.
      want: For each stack that it computes, the spec of an entry's shard; None if it is not a
        gradient.
      sums: By position of a stack, the sum that is reduced one iteration later, see
        :func:`decide_deferrals`.
      gatherer: Reduces gradients.
    """

    _stacks: Sequence[Atom]

    def __init__(
        self,
        eqn: Equation,
        want: Sequence[Spec | None],
        sums: Mapping[int, RowSum],
        gatherer: Gatherer,
    ) -> None:
        self._loop: ScanParts = jaxprs.scan_parts(eqn)
        _, self._stacks = self._loop.results(eqn.outvars)
        self._want, self._sums, self._gatherer = want, sums, gatherer

    @property
    def row_sums(self) -> dict[Atom, RowSum]:
        """By variable, the sum that produces the partial sums."""
        return {each.eqn.outvars[0]: each for each in self._sums.values()}

    def order(self) -> tuple[jax.Array, jax.Array] | None:
        """Returns two int [length] arrays: for each iteration the index of the previous one (for
        the first out of bounds), and its own index. None if no reduction is deferred."""
        indices, to_previous = jnp.arange(self._loop.length), -self._loop.order.step
        return (indices + to_previous, indices) if self._sums else None

    def first(self) -> list[Pending]:
        """Returns the state that the first iteration receives: no partial sums, and no stacks."""
        return [(None, None) for _ in self._sums]

    def hold(self, given: list[Pending], gathered: jax.Array | None) -> list[Pending]:
        """Delays the smallest of the pending partial sums until the array ``gathered`` exists. XLA
        combines one layer's reductions, so that all of them wait."""
        parts = [x for x, _ in given if x is not None]
        if gathered is None or not parts:
            return given
        smallest = min(parts, key=lambda x: x.size)
        (held,) = order.hold_largest([smallest], gathered)
        held = pin_to_devices(held, self._gatherer)
        return [(held if x is smallest else x, stack) for x, stack in given]

    def reduced(self, given: Sequence[Pending]) -> list[ReducedGradient | None]:
        """Reduces the partial sums of the previous iteration to gradients; None where there are
        none."""
        reduced: list[ReducedGradient | None] = []
        for (i, row_sum), (parts, _) in zip(self._sums.items(), given, strict=True):
            spec = self._want[i] or ()
            with self._gatherer.ledger.of(spec):
                partial = None if parts is None else PartialSum(parts, row_sum, row_sum.links)
                value = None if partial is None else total(partial, self._gatherer)
            reduced.append(None if value is None else ReducedGradient(value, spec))
        return reduced

    def passed(
        self,
        given: Sequence[Pending],
        reduced: Sequence[ReducedGradient | None],
        outs: Sequence[Any],
        at: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[list[Pending], list[Any]]:
        """Returns the state that an iteration passes to the next one, and its results ``outs``, the
        last of which belong to the stacks, with None for each deferred gradient."""
        state: list[Pending] = []
        results, first = list(outs), len(outs) - len(self._stacks)
        for i, (parts, stack), gradient in zip(self._sums, given, reduced, strict=True):
            assert at is not None
            y, results[first + i] = results[first + i], None
            if stack is None:
                stack = self._zeros(i, y.value if isinstance(y, PartialSum) else y)
            if isinstance(y, PartialSum):
                if gradient is not None:
                    stack = _put(stack, gradient.value, at[0])
                state.append((y.value, stack))
            else:
                state.append((parts, _put(stack, y, at[1])))
        return state, [
            total(x, self._gatherer) if isinstance(x, PartialSum) else x for x in results
        ]

    def _zeros(self, i: int, known: jax.Array) -> jax.Array:
        """Returns the stack of shards of gradient ``i`` before the first one, filled with zeros."""
        aval = self._stacks[i].aval
        # Otherwise XLA fills the stacks of all gradients before the loss, where it holds most.
        zero, _ = lax.optimization_barrier((jnp.zeros((), aval.dtype), known))
        return lax.broadcast(zero, aval.shape)

    def finished(self, given: Sequence[Pending]) -> dict[int, jax.Array]:
        """Reduces the last iteration's partial sums; returns the complete stacks by position."""
        finished = {}
        for i, (_, stack), x in zip(self._sums, given, self.reduced(given), strict=True):
            assert stack is not None
            finished[i] = stack if x is None else _put(stack, x.value, self._loop.order[-1])
        return finished


def decide_deferrals(
    loop: ScanParts, want: Sequence[Spec | None], gatherer: Gatherer, rows: RowDimensions
) -> dict[int, RowSum]:
    """Returns, by position of a stack, the sum of each gradient that a scan reduces one iteration
    later.

    Args:
      loop: The scan.
      want: See :class:`DeferredReductions`.
      gatherer: Reduces gradients.
      rows: The dimensions along which rows of the batch lie.
    """
    if not gatherer.sums_own_rows or loop.length < LEAST:
        return {}
    body, _ = jaxprs.open_jaxpr(loop.body)
    _, results = loop.results(body.outvars)
    return {
        i: row_sum
        for i, (v, spec) in enumerate(zip(results, want, strict=True))
        if (row_sum := _row_sum(body, v, spec, gatherer, rows)) is not None
    }


def decide_block_sums(
    jaxpr: Jaxpr, wants: Mapping[Atom, Spec], gatherer: Gatherer, rows: RowDimensions
) -> dict[Atom, dict[Atom, RowSum]]:
    """Returns, by sum of the gradients of one parameter that rematerialised blocks compute, the
    blocks' results with the sums over rows that produce them. None are added up if several
    parameters' have more elements than the parameters that stay unsharded in a pass.

    Args:
      jaxpr: The program that contains the blocks.
      wants: See :func:`zerojax.collectives.target_specs.trace_back`.
      gatherer: Reduces gradients.
      rows: The dimensions along which rows of the batch lie.
    """
    graph, seen = graph_of(jaxpr), set[Atom]()
    found: dict[Atom, dict[Atom, RowSum]] = {}

    for out in reversed(graph.in_order(wants)):
        part = graph.backward_slice([out], through=lambda eqn: eqn.primitive.name == "add_any")
        blocks = [graph.producer(v) for v in part.ends]
        if out in seen or not all(x and order.takes_turns(x, rows, gatherer.mesh) for x in blocks):
            continue
        seen.update(part.results)
        sums = {v: _row_sum(jaxpr, v, wants.get(v), gatherer, rows) for v in part.ends}
        known = {v: each for v, each in sums.items() if each is not None}
        forms = {each.form for each in known.values()}
        once = all(graph.times_used(v) == 1 for v in part.results if v is not out)
        if once and len(known) == len(part.ends) > len(forms) == 1:
            found[out] = known
    several = len(found) > 1 and sum(v.aval.size for v in found) > gatherer.thresholds.ahead
    return {} if several else found


def _put(stack: jax.Array, entry: jax.typing.ArrayLike, at: jax.Array | int) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, entry, at, 0)


def _row_sum(
    jaxpr: Jaxpr,
    v: Atom,
    spec: Spec | None,
    gatherer: Gatherer,
    rows: RowDimensions,
    after: tuple[Equation, ...] = (),
) -> RowSum | None:
    """Returns the sum over rows that produces ``v``, perhaps within calls, and has no other use;
    None if there is no such sum, or if not every device could reduce a shard of it."""
    graph = graph_of(jaxpr)
    # Another use would need the sum in its own iteration.
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
