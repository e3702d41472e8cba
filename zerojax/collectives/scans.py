"""Loops over stacks, run on sharded values: their operands, carries, prefetches and results.

A loop whose iterations gather for the next one and reduce for the previous one has nothing to
gather in its last iteration, and nothing to reduce in its first. These two run outside the loop: in
it, one layer too many would be gathered, and one reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import decide, decisions
from zerojax.collectives.carried_sums import CarriedSums
from zerojax.collectives.deferred import DeferredReductions
from zerojax.collectives.gathering import Gatherer, Scope, plain
from zerojax.collectives.host import send_to_host, unpadded
from zerojax.collectives.prefetch import PrefetchedStacks
from zerojax.collectives.shard import (
    Gathering,
    HostGradient,
    HostStack,
    MovedStack,
    Shard,
    moved_stack,
)
from zerojax.collectives.stacks import GatheredStacks, LoopStacks
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.stored import pad
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, PyTree


def peeled_scan(
    body: Callable[..., tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    *,
    length: int,
    reverse: bool,
    unroll: int,
    peel: bool,
) -> tuple[PyTree, PyTree]:
    """Runs ``lax.scan`` on stacks some of which are a :class:`MovedStack`.

    Args:
      body: ``body(carry, entries)`` returns the next carry and the entries of the results.
      init: The first carry.
      xs: The stacks.
      length, reverse, unroll: See ``lax.scan``.
      peel: Whether the first and the last of at least two iterations run outside the loop, the last
        as ``body(carry, entries, last=True)``. The first and the last carry may then have another
        structure than those between iterations.
    """
    leaves, tree = jax.tree.flatten(xs)
    moved = {i: x for i, x in enumerate(leaves) if isinstance(x, MovedStack)}
    others = [x for i, x in enumerate(leaves) if i not in moved]
    if not moved and not peel:
        return lax.scan(body, init, xs, length=length, reverse=reverse, unroll=unroll)

    def entries(index: jax.Array | int, others: Sequence[jax.Array]) -> PyTree:
        unmoved = iter(others)
        layers = [
            moved[i].layer(index) if i in moved else next(unmoved) for i in range(len(leaves))
        ]
        return jax.tree.unflatten(tree, layers)

    if not peel:
        return lax.scan(
            lambda carry, at: body(carry, entries(*at)),
            init,
            (jnp.arange(length), others),
            reverse=reverse,
            unroll=unroll,
        )

    def run(state: PyTree, index: jax.Array | int, **end: bool) -> tuple[PyTree, PyTree]:
        carry, stacks = state
        sliced = [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in others]
        carry, ys = body(carry, entries(index, sliced), **end)
        if stacks is None:
            stacks = jax.tree.map(partial(_zeros, length), ys)
        put = partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return carry, jax.tree.map(put, stacks, ys)

    first, *between, last = reversed(range(length)) if reverse else range(length)
    state = run((init, None), first)
    if between:
        indices = jnp.asarray(between)
        state, _ = lax.scan(lambda s, i: (run(s, i), None), state, indices, unroll=unroll)
    return run(state, last, last=True)


def _zeros(length: int, entry: jax.Array) -> jax.Array:
    """Returns a stack of zeros for entries like ``entry``, in the same memory."""
    zero = jnp.zeros((), entry.dtype)
    if jax.typeof(entry).memory_space == jax.memory.Space.Host:
        zero = send_to_host(zero)
    return lax.broadcast(zero, (length, *entry.shape))


class Scans(Gatherer):
    """Runs scans on sharded values.

    Attributes:
      overlap: Whether loops gather one iteration ahead, and reduce one iteration later.
      share: Whether one gather of a parameter serves all its uses in the body.
      layers: The bytes of :class:`LoopDecisions` of each loop that has run, for XLA's options.
      left: True once a loop has sent residuals to host memory, or if none are to be sent; set too
        when the warning that none can be sent has been logged.
    """

    overlap: bool
    share: bool
    layers: list[int]
    left: bool

    def run(
        self,
        closed: AnyJaxpr,
        args: Sequence[object],
        scope: Scope,
        want: Sequence[Spec | None] = (),
    ) -> list[Any]:
        """Returns a jaxpr's results on sharded values."""
        raise NotImplementedError

    def scan(
        self,
        eqn: Equation,
        values: Sequence[Any],
        scope: Scope,
        want: Sequence[Spec | None],
        leaving: set[Atom],
    ) -> Sequence[object]:
        """Returns a scan's results.

        Args:
          eqn: The scan.
          values: Its operands.
          scope: The scope that contains the scan.
          want: For each result that is a gradient the spec of its shard, for a stack that of one
            entry's shard; None for others.
          leaving: The variables of the stacks that wait in host memory for the backward pass.
        """
        a, n = jaxprs.scan_counts(eqn)
        values = [scope.as_filled(v) for v in values]
        moved = [moved_stack(x) for x in values[a + n :]]
        updated = {} if self.lanes_on_axis else decide.find_updated(eqn, values, self)
        known = self.all_known(values, scope)
        values = [v if i - a in updated else known[i] for i, v in enumerate(values)]
        prefetches = self.overlap and not self.keep
        decided = decide.decide_loop(
            eqn, values, want, self, scope, updated=updated, prefetches=prefetches
        )
        self.layers.append(decided.layer)
        sums, kept = decided.sums, decided.carried
        # A gradient may start from the shard of an earlier one, to which the loop only adds.
        updated = {i: spec for i, spec in updated.items() if i in kept}
        consts, start, xs = values[:a], values[a : a + n], values[a + n :]
        consts = self.held(decided.constants, consts, scope, values)
        with self.ledger.place(decisions.BEFORE_LOOP, "the loop needs it unsharded"):
            given = [plain(start[i]) if i in updated else start[i] for i in kept]
            carry = self.gather_all(given, scope)
            xs = [
                self.gather(x, scope, values) if i in decided.gathered else x
                for i, x in enumerate(xs)
            ]
        if updated:
            xs = [self.by_rows(x, 1) for x in xs]  # see minibatches
        length, reverse = jaxprs.param(eqn, "length"), jaxprs.param(eqn, "reverse")
        entries = LoopStacks(
            [x if m is None else m for x, m in zip(xs, moved, strict=True)], self.axis
        )
        prefetching = PrefetchedStacks(eqn, entries.read, decided.prefetched, self)
        deferring = DeferredReductions(eqn, want[n:], decided.deferred, self)
        filling = GatheredStacks(xs, decided.filled, prefetching)
        jaxpr, m = sums.body(), len(kept)
        stacks = eqn.outvars[n:]
        sent_specs: dict[int, Spec | None] = {}

        # The loop carries four things: the values that it does not only add up, the sums so far,
        # the entries read ahead for this iteration, and the deferred partial sums with the stacks
        # of their gradients. An iteration takes the index of the next one, the indices of the
        # previous one and of itself, and its entries of the stacks and of their rounded copies.
        # A last iteration that runs outside the loop reads nothing ahead.
        def body(state: PyTree, at: PyTree, *, last: bool = False) -> tuple[PyTree, PyTree]:
            (carry, totals, come, given), (index, indices, rest, rounded) = state, at
            with self.ledger.place(decisions.PREFETCHED, "gathered one iteration ahead"):
                coming = [] if last else prefetching.read(index)
            with self.ledger.place(decisions.DEFERRED, "reduced one iteration later"):
                reduced = deferring.reduced(deferring.hold(given, prefetching.last(coming)))
            sliced = entries.operands(
                prefetching.merged(come, rest), rounded, prefetching.unsharded(come)
            )
            current = dict(zip(kept, prefetching.hold(carry, coming), strict=True))
            carried = self.carried([current.get(i) for i in range(n)], updated)
            # An iteration that updates the state is a separate step.
            share = self.share or not updated
            inner_scope = scope.inner(
                deferring.row_sums, of_layer=decided.of_layer, of_step=bool(updated), share=share
            )
            with self.ledger.place(decisions.LOOP):
                outs = self.run(jaxpr, (*consts, *carried, *sliced), inner_scope, decided.want)
            outs, added = outs[: m + len(stacks)], outs[m + len(stacks) :]
            given, outs = deferring.passed(given, reduced, outs, indices)
            ys = outs[m:]
            for i, spec in enumerate(want[n:]):
                y = plain(ys[i])
                if scope.host and spec is not None and scope.host.takes(y, length):
                    sent_specs[i] = spec
                    padded_shape = layout.padded_shape(y.shape, spec, self.mesh)
                    ys[i] = scope.host.send(pad(y, padded_shape))
                elif stacks[i] in leaving and not isinstance(ys[i], Shard):
                    sent_specs[i], self.left = None, True
                    ys[i] = send_to_host(y)
                else:
                    ys[i] = entries.stack(i, ys[i])
            totals = [total + plain(x) for total, x in zip(totals, added, strict=True)]
            new_carry = [
                self.passed_on(o, updated.get(i)) for i, o in zip(kept, outs, strict=False)
            ]
            return (new_carry, totals, coming, given), (ys, filling.layers(come))

        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in sums.roots]
        (carry, totals, _, given), (ys, gathered) = peeled_scan(
            body,
            (carry, zeros, prefetching.first(), deferring.first()),
            (prefetching.order(), deferring.order(), prefetching.rest(), entries.rounded),
            length=length,
            reverse=reverse,
            unroll=jaxprs.param(eqn, "unroll"),
            peel=decided.peels,
        )
        final: dict[int, Any] = dict(zip(kept, carry, strict=True))
        final |= {i: Shard(final[i], spec) for i, spec in updated.items()}
        with self.ledger.place(decisions.AFTER_LOOP, "summed over all iterations first"):
            final.update(self._summed(sums, totals, start, scope))

        scope.filled |= {id(pair[0]): pair for pair in filling.filled(gathered)}
        with self.ledger.place(decisions.AFTER_LOOP, "the last iteration's gradients"):
            finished = deferring.finished(given)

        def stacked(i: int, y: PyTree) -> object:
            if i in finished:
                return finished[i]
            if i not in sent_specs:
                return entries.stacked(i, y)
            spec = sent_specs[i]
            if spec is None:
                return HostStack(y)
            value = unpadded(y[0], eqn.outvars[n + i].aval.shape)
            return HostGradient(value, (None, *spec), gathering=Gathering(host=True), sums=y[1])

        return [*(final[i] for i in range(n)), *(stacked(i, y) for i, y in enumerate(ys))]

    def held(
        self,
        positions: Collection[int],
        consts: Sequence[Any],
        scope: Scope,
        rest: Sequence[object] = (),
    ) -> list[object]:
        """Gathers a loop's constants at ``positions``, which each iteration needs unsharded."""
        with self.ledger.place(decisions.BEFORE_LOOP, "each iteration needs all of it"):
            return [
                self.gather(c, scope, rest) if i in positions else c for i, c in enumerate(consts)
            ]

    def carried(self, values: Sequence[Any], updated: Mapping[int, Spec]) -> list[object]:
        """Returns carried values as an iteration takes them: state that the loop updates as
        shards."""
        return [
            Shard(self.constrain(x, updated[i]), updated[i]) if i in updated else x
            for i, x in enumerate(values)
        ]

    def passed_on(self, value: Shard | jax.Array, spec: Spec | None) -> jax.Array:
        """Returns a carried value after an iteration as the loop carries it. ``spec`` is the spec
        of its shard; None if the loop does not update the value as a shard."""
        if spec is None:
            return plain(value)
        if isinstance(value, Shard) and value.spec != spec:
            value = self.all_gather(value.value, value.spec)
        return self.constrain(plain(value), spec)

    def _summed(
        self,
        sums: CarriedSums,
        totals: Sequence[jax.Array],
        start: Sequence[Shard | jax.Array],
        scope: Scope,
    ) -> dict[int, jax.Array]:
        """Reduces over the devices, once, the carried values that a loop has added up.

        The full sums are constrained before their shards: XLA moves a sum over the devices out of
        the loop only if it is a sum of the full array.
        """
        specs = {v: sums.spec(v, self.mesh, self.axis) for v in sums.roots}
        by_root = {
            v: x if (spec := specs[v]) is None else self.scatter_unsharded(x, spec)
            for v, x in zip(sums.roots, totals, strict=True)
        }
        reduced = {}
        for i, terms in sums.terms.items():
            (total,) = self.gather_all([start[i]], scope)
            for term in terms:
                total = total + term.of(by_root[term.root])
            is_unsharded = any(specs[term.root] is None for term in terms)
            reduced[i] = (self.scatter_unsharded if is_unsharded else self.constrain)(
                total, sums.want[i]
            )
        return reduced
