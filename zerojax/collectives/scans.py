"""Loops over stacks, run on sharded values: their operands, carries, prefetches and results.

A loop whose iterations gather for the next one and reduce for the previous one has nothing to
gather in its last iteration, and nothing to reduce in its first. These two run outside the loop: in
it, one layer too many would be gathered, and one reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.collectives import decisions, order, target_specs
from zerojax.collectives.decide import EquationDecisions
from zerojax.collectives.deferred import DeferredReductions, Pending
from zerojax.collectives.gathering import Gatherer, Scope, plain
from zerojax.collectives.host import send_to_host, unpadded
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.prefetch import PrefetchedStacks
from zerojax.collectives.shard import (
    Abstract,
    FilledStack,
    Gathering,
    HostGradient,
    HostStack,
    MovedStack,
    ReducedGradient,
    Shard,
    moved_stack,
)
from zerojax.collectives.stacks import GatheredStacks, LoopStacks
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.stored import pad
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import AnyJaxpr, Atom, PyTree, Value


def peeled_scan(
    body: Callable[..., tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    loop: ScanParts,
    ledger: Ledger,
    *,
    peel: bool,
) -> tuple[PyTree, PyTree]:
    """Runs a scan on other values, with stacks some of which are a :class:`MovedStack`.

    Args:
      body: ``body(carry, entries)`` returns the next carry and the entries of the results.
      init: The first carry.
      xs: The stacks.
      loop: The scan.
      ledger: Records the collectives of the iterations.
      peel: Whether the first and the last of at least two iterations run outside the loop, the last
        as ``body(carry, entries, last=True)``. The first and the last carry may then have another
        structure than those between iterations.
    """
    leaves, tree = jax.tree.flatten(xs)
    moved = {i: x for i, x in enumerate(leaves) if isinstance(x, MovedStack)}
    others = [x for i, x in enumerate(leaves) if i not in moved]
    if not moved and not peel:
        with ledger.repeats(loop.length):
            return loop.scan(ledger.last_trace(body), init, xs)

    def entries(index: jax.Array | int, others: Sequence[jax.Array]) -> PyTree:
        unmoved = iter(others)
        layers = [
            moved[i].layer(index) if i in moved else next(unmoved) for i in range(len(leaves))
        ]
        return jax.tree.unflatten(tree, layers)

    if not peel:
        indexed = jnp.arange(loop.length), others
        by_index = ledger.last_trace(lambda carry, at: body(carry, entries(*at)))
        with ledger.repeats(loop.length):
            return loop.scan(by_index, init, indexed)

    def run(state: PyTree, index: jax.Array | int, **end: bool) -> tuple[PyTree, PyTree]:
        carry, stacks = state
        sliced = [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in others]
        carry, ys = body(carry, entries(index, sliced), **end)
        if stacks is None:
            # lax.scan stacks only results of its own iterations. The others write into the same
            # arrays, which XLA updates in place as the carry of a loop.
            stacks = jax.tree.map(partial(_zeros, loop.length), ys)
        put = partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return carry, jax.tree.map(put, stacks, ys)

    first, *between, last = loop.order
    state = run((init, None), first)
    if between:
        indices = jnp.asarray(between)
        inner = ledger.last_trace(lambda state, i: (run(state, i), None))
        with ledger.repeats(len(between)):
            state, _ = lax.scan(inner, state, indices, unroll=loop.unroll)
    return run(state, last, last=True)


def _zeros(length: int, entry: jax.Array) -> jax.Array:
    """Returns a stack of zeros for entries like ``entry``, in the same memory."""
    # JAX refuses to write an entry in host memory into a stack on the device.
    zero = jnp.zeros((), entry.dtype)
    if jax.typeof(entry).memory_space == jax.memory.Space.Host:
        zero = send_to_host(zero)
    return lax.broadcast(zero, (length, *entry.shape))


class Scans(Gatherer):
    """Runs the programs of loops on sharded values.

    Attributes:
      overlap: Whether loops gather one iteration ahead, and reduce one iteration later.
      share: Whether one gather of a parameter serves all its uses in the body.
      layers: The bytes of :class:`LoopDecisions` of each loop that has run, for XLA's options.
      left: True once a loop has sent residuals to host memory, or if none are to be sent; set too
        when the warning that none can be sent has been logged.
      within: Runs a program inside an equation, see :class:`zerojax.collectives.insert.Inserter`.
    """

    overlap: bool
    share: bool
    layers: list[int]
    left: bool
    within: Callable[..., list[Value]]

    def known_operands(
        self, loop: ScanParts, values: Sequence[Value], updated: Container[int], scope: Scope
    ) -> list[Value]:
        """Returns a scan's operands, see :meth:`all_known`; the state that it updates stays
        sharded."""
        return [
            v if i - loop.consts in updated else self.all_known([v], scope)[0]
            for i, v in enumerate(values)
        ]

    def gather_constants(
        self,
        positions: Collection[int],
        body: AnyJaxpr,
        consts: Sequence[Value],
        scope: Scope,
        rest: Sequence[Value] = (),
    ) -> list[Value]:
        """Gathers the constants at ``positions`` of a loop's body, which each iteration needs
        unsharded."""
        given, gathered = jaxprs.open_jaxpr(body)[0].invars, list(consts)
        for i in sorted(positions):
            with (
                self.ledger.place(decisions.BEFORE_LOOP, "each iteration needs all of it"),
                self.ledger.used_in(body, given[i]),
            ):
                # Beside the loop XLA would keep what it dequantizes, and multiply in bfloat16.
                gathered[i] = self.gather(consts[i].uncoded(), scope, rest)
        return gathered

    def carried(self, values: Sequence[Value], updated: Mapping[int, Spec]) -> list[Value]:
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
        # The carry of a loop has one sharding in all iterations.
        if isinstance(value, Shard) and value.spec != spec:
            value = self.all_gather(value.value, value.spec)
        return self.constrain(plain(value), spec)


class _Carry(NamedTuple):
    """The values that an iteration passes to the next one.

    Attributes:
      values: The carried values that the loop does not only add up.
      totals: The sums so far.
      coming: The entries of stacks that were read ahead for the next iteration.
      pending: The partial sums to be reduced by the next iteration, with the stacks of gradients.
    """

    values: list[jax.Array]
    totals: list[jax.Array]
    coming: list[jax.Array]
    pending: list[Pending]


class _Entries(NamedTuple):
    """The values that an iteration takes beside the carry.

    Attributes:
      next: The index of the next iteration; None if nothing is read ahead.
      indices: Those of the previous iteration and of this one; None if no reduction is deferred.
      sliced: The entries of the stacks that the loop itself slices.
      rounded: The entries of copies that were gathered in a narrower dtype.
    """

    next: jax.Array | None
    indices: tuple[jax.Array, jax.Array] | None
    sliced: PyTree
    rounded: PyTree


_Stacked = tuple[list[PyTree], list[jax.Array]]
"""The stacks of a loop's results, and of the layers that it has gathered for later loops."""


class Loop:
    """One scan on sharded values.

    Args:
      scans: Runs its iterations.
      at: The decisions on the scan.
      values: Its operands.
      scope: The scope that contains the scan.
    """

    _want: Sequence[Spec | None]
    _outs: Sequence[Atom]
    _start: Sequence[Value]

    def __init__(
        self, scans: Scans, at: EquationDecisions, values: Sequence[Value], scope: Scope
    ) -> None:
        self._scans, self._scope, self._at, self._decided = scans, scope, at, at.scan
        self._parts: ScanParts = jaxprs.scan_parts(at.eqn)
        parts, decided, eqn = self._parts, at.scan, at.eqn
        want = target_specs.of_scan_body(parts, at.wants)
        (_, self._want), (_, self._outs) = parts.results(want), parts.results(eqn.outvars)
        # The forward loop has gathered and stacked these for the backward loop.
        values = [scope.emitted.as_filled(v) for v in values]
        moved = [moved_stack(x) for x in parts.operands(values)[2]]
        values = scans.known_operands(parts, values, decided.updated, scope)
        # A gradient may start from the shard of an earlier one, to which the loop only adds.
        self._updated = {i: spec for i, spec in decided.updated.items() if i in decided.carried}
        consts, self._start, xs = parts.operands(values)
        self._consts = scans.gather_constants(decided.constants, parts.body, consts, scope, values)
        with scans.ledger.place(decisions.BEFORE_LOOP, "the loop needs it unsharded"):
            given = [
                plain(self._start[i]) if i in self._updated else self._start[i]
                for i in decided.carried
            ]
            self._carry = scans.gather_all(given, scope)
            xs = [
                scans.gather(x, scope, values) if i in decided.gathered else x
                for i, x in enumerate(xs)
            ]
        if self._updated:
            # Minibatches of a loop of updates, which XLA would replicate, see own_rows.
            xs = [scans.by_rows(x, 1) for x in xs]
        read = [x if m is None else m for x, m in zip(xs, moved, strict=True)]
        self._stacks = LoopStacks(read, scans.axis)
        self._prefetched = PrefetchedStacks(eqn, self._stacks.read, decided.prefetched, scans)
        self._deferred = DeferredReductions(eqn, self._want, decided.deferred, scans)
        self._xs, self._filling = xs, GatheredStacks(xs, decided.filled, self._prefetched)
        self._jaxpr = decided.sums.body()

    def _iterations(self) -> tuple[_Carry, _Stacked]:
        """Runs the iterations; returns the last carry, and the stacks."""
        in_place = self._decided.in_place.items()
        pairs = [(jnp.zeros(v.aval.shape, v.aval.dtype), spec) for v, spec in in_place]
        zeros = [x if spec is None else self._scans.constrain(x, spec) for x, spec in pairs]
        prefetched, deferred = self._prefetched, self._deferred
        start = _Carry(self._carry, zeros, prefetched.first(), deferred.first())
        orders = prefetched.order(), deferred.order()
        return peeled_scan(
            self._iteration,
            start,
            _Entries(*orders, prefetched.rest(), self._stacks.rounded),
            self._parts,
            self._scans.ledger,
            peel=bool(self._decided.prefetched or self._decided.deferred),
        )

    def _iteration(
        self, state: _Carry, at: _Entries, *, last: bool = False
    ) -> tuple[_Carry, _Stacked]:
        """Runs one iteration; a last one outside the loop reads nothing ahead."""
        scans, decided, updated = self._scans, self._decided, self._updated
        prefetched, deferred = self._prefetched, self._deferred
        index = None if last else at.next

        def read(done: Sequence[ReducedGradient] = ()) -> list[jax.Array]:
            with scans.ledger.place(decisions.PREFETCHED, "gathered one iteration ahead"):
                return [] if index is None else prefetched.read(index, done)

        gathers_first = order.gathers_first(scans.mesh)
        coming = read() if gathers_first else []
        pending = deferred.hold(state.pending, prefetched.last(coming))
        with scans.ledger.place(decisions.DEFERRED, "reduced one iteration later"):
            reduced = deferred.reduced(pending)
        done = [x for x in reduced if x is not None]
        coming = coming if gathers_first else read(done)
        merged = prefetched.merged(state.coming, at.sliced)
        unsharded = prefetched.unsharded(state.coming)
        is_held = done and not gathers_first
        held = state.values if is_held else prefetched.hold(state.values, coming)
        outs = self._run(held, self._stacks.operands(merged, at.rounded, unsharded))
        end = len(decided.carried) + len(self._want)
        outs, added = outs[:end], outs[end:]
        pending, outs = deferred.passed(state.pending, reduced, outs, at.indices)
        ys = [self._stacked(i, y) for i, y in enumerate(outs[len(decided.carried) :])]
        totals = [total + plain(x) for total, x in zip(state.totals, added, strict=True)]
        values = [
            scans.passed_on(o, updated.get(i)) for i, o in zip(decided.carried, outs, strict=False)
        ]
        return _Carry(values, totals, coming, pending), (ys, self._filling.layers(state.coming))

    def _run(self, values: Sequence[Value], entries: Sequence[Value]) -> list[Value]:
        """Runs the program of an iteration on carried values and entries of stacks."""
        scans, decided, updated = self._scans, self._decided, self._updated
        current = dict(zip(decided.carried, values, strict=True))
        carried = scans.carried([current.get(i) for i in range(self._parts.carry)], updated)
        # An iteration that updates the state is a separate step.
        inner_scope = self._scope.inner(
            self._deferred.row_sums,
            of_layer=decided.of_layer,
            of_step=bool(updated),
            share=scans.share or not updated,
        )
        with scans.ledger.place(decisions.LOOP):
            args = (*self._consts, *carried, *entries)
            return scans.within(self._at, 0, self._jaxpr, args, inner_scope, decided.want)

    def _stacked(self, i: int, y: PyTree) -> object:
        """Returns an iteration's result ``i`` in the form that the loop stacks."""
        host, value = self._scope.host, plain(y)
        if i not in self._at.sent:
            return self._stacks.stack(i, y)
        if host is None or (spec := self._at.sent[i]) is None:
            self._scans.left = True
            return send_to_host(value)
        return host.send(pad(value, layout.padded_shape(value.shape, spec, self._scans.mesh)))

    def abstract_results(self) -> list[Value]:
        """Runs one iteration on abstract arrays, and decides which of its results are sent to host
        memory; returns the results of the loop."""
        decided, sent, stacks, host = self._decided, self._at.sent, self._stacks, self._scope.host
        _, _, xs = self._parts.operands(self._at.eqn.invars)
        read, rounded = map(_dtype, stacks.read), map(_dtype, stacks.rounded)
        operands = stacks.operands(
            [*map(_entry, xs, read)],
            [*map(_entry, xs, rounded)],
            [*map(_entry, xs, map(decided.prefetched.get, range(len(xs))))],
        )
        outs = self._run(self._carry, operands)[len(decided.carried) :]
        results: list[Value] = [*map(Abstract.of, self._at.eqn.outvars)]
        for i, spec in self._updated.items():
            results[i] = Shard(results[i], spec)
        for i, (v, y) in enumerate(zip(self._outs, outs, strict=False)):
            at, target = self._parts.carry + i, self._want[i]
            if i in decided.deferred:
                continue
            if host and target is not None and host.takes(plain(y), self._parts.length):
                sent[i] = target
                gathering = Gathering(host=True)
                results[at] = HostGradient(results[at], (None, *target), gathering=gathering)
            elif v in self._at.program.leaving and not isinstance(y, Shard):
                sent[i], results[at] = None, HostStack(results[at])
            elif isinstance(y, Shard):
                entry = stacks.stack(i, y)
                results[at] = stacks.stacked(i, results[at].astype(_dtype(entry)))
        for i, dimension in decided.filled.items():
            x = self._xs[i].with_gathering(by_loop=False)
            filled = x.with_copy(x.value, FilledStack(x.value, dimension))
            self._scope.emitted.gathered[id(self._xs[i])] = self._xs[i], filled
        return results

    def results(self) -> list[Value]:
        """Runs the loop, and returns its results."""
        scans, (last, (ys, gathered)) = self._scans, self._iterations()
        final: dict[int, Value] = dict(zip(self._decided.carried, last.values, strict=True))
        final |= {i: Shard(final[i], spec) for i, spec in self._updated.items()}
        with scans.ledger.place(decisions.AFTER_LOOP, "summed over all iterations first"):
            final.update(self._summed(last.totals))
        self._scope.emitted.gathered |= {
            id(pair[0]): pair for pair in self._filling.filled(gathered)
        }
        with scans.ledger.place(decisions.AFTER_LOOP, "the last iteration's gradients"):
            finished = self._deferred.finished(last.pending)

        def stack(i: int, y: PyTree) -> object:
            if i in finished:
                return finished[i]
            if i not in self._at.sent:
                return self._stacks.stacked(i, y)
            if (spec := self._at.sent[i]) is None:
                return HostStack(y)
            value = unpadded(y[0], self._outs[i].aval.shape)
            return HostGradient(value, (None, *spec), gathering=Gathering(host=True), sums=y[1])

        carried = [final[i] for i in range(self._parts.carry)]
        return [*carried, *(stack(i, y) for i, y in enumerate(ys))]

    def _summed(self, totals: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """Reduces over the devices, once, the carried values that a loop has added up."""
        scans, sums = self._scans, self._decided.sums
        specs = {v: sums.spec(v, scans.mesh, scans.axis) for v in sums.roots}
        by_root = {}
        for (v, own), x in zip(self._decided.in_place.items(), totals, strict=True):
            if own is not None:
                by_root[v] = scans.constrain(x, own)
                continue
            with scans.ledger.at(sums.producer(v)), scans.ledger.of(*sums.targets(v)):
                # XLA moves a sum over the devices out of the loop only if it is constrained to the
                # full array first: of 64 time steps each would reduce-scatter the gradient, 59 MB
                # for 0.9.
                by_root[v] = x if (spec := specs[v]) is None else scans.scatter_unsharded(x, spec)
        reduced = {}
        for i, terms in sums.terms.items():
            (total,) = scans.gather_all([self._start[i]], self._scope)
            for term in terms:
                total = total + term.of(by_root[term.root])
            is_unsharded = any(specs[term.root] is None for term in terms)
            reduced[i] = (scans.scatter_unsharded if is_unsharded else scans.constrain)(
                total, sums.want[i]
            )
        return reduced


def _dtype(x: Value) -> Value:
    """Returns the dtype of an array, of a shard or of a stack; None for None."""
    return getattr(getattr(x, "value", x), "dtype", None)


def _entry(stack: Atom, dtype: np.dtype | None) -> Value:
    """Returns an entry of a stack, in a dtype; None for None."""
    return None if dtype is None else Abstract(stack.aval.shape[1:], dtype)
