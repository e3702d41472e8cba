"""Prefetch of a loop's operands by one iteration: from host memory, and by all-gathers.

A loop over layers takes its parameters as slices of stacks. An iteration would wait for an
all-gather whose result it uses. So each iteration receives the unsharded parameters of its layer,
and gathers those of the next layer while it computes. This holds one more layer.

A loop that gathers, or that reduces gradients one iteration later, runs its last iteration outside,
where it reads nothing ahead, see :mod:`zerojax.collectives.scans`. In a loop that only reads
ahead from host memory the last iteration fetches its own entries again; the result is unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.collectives import decisions, order, residuals
from zerojax.collectives.gathering import Gatherer, is_on_devices
from zerojax.collectives.host import entry, on_host
from zerojax.collectives.quantization import encode
from zerojax.collectives.shard import HostStack, ReducedGradient, Shard
from zerojax.collectives.uses import Uses
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.quantized import E4M3
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import Equation

# A loop of 3 layers of 1024 x 4096 on 8 H100s: 67 MB are gathered at once if 2 iterations are
# enough, 17 MB if it gathers where it computes.
LEAST = 4
"""The fewest iterations of a loop that gathers ahead, or reduces one iteration later: the first and
the last one run outside the loop, and XLA removes a loop of one iteration. Without a loop between
them, XLA mixes all layers, which holds more memory and hides less."""


class PrefetchedStacks:
    """The stacks that a loop reads, some of them one iteration ahead.

    Args:
      eqn: The scan.
      xs: The stacks, along the first dimension, see :class:`zerojax.collectives.stacks.LoopStacks`.
        A :class:`Shard` or :class:`HostStack` in host memory is prefetched.
      dtypes: By position, the dtypes of the stacks that are gathered ahead, see
        :func:`decide_prefetches`.
      gatherer: Gathers parameters.
    """

    def __init__(
        self, eqn: Equation, xs: Sequence[Any], dtypes: Mapping[int, jnp.dtype], gatherer: Gatherer
    ) -> None:
        self._xs, self._dtypes, self._gatherer = xs, dtypes, gatherer
        self._loop, self._holds = jaxprs.scan_parts(eqn), residuals.holds_block(eqn)

    def order(self) -> jax.Array | None:
        """Returns an int [length] array: for each iteration the index of the next one; for the last
        its own. None if nothing is read ahead."""
        if not any(map(on_host, self._xs)) and not self._dtypes:
            return None
        # The backward pass of a scan is a scan in reverse.
        length, step = self._loop.length, self._loop.order.step
        return jnp.clip(jnp.arange(length) + step, 0, length - 1)

    def read(self, index: jax.Array | int, done: Sequence[ReducedGradient] = ()) -> list[jax.Array]:
        """Fetches or gathers the entries at ``index`` of the stacks that are read ahead. Gathers
        wait for the largest of the gradients ``done``, which the same iteration reduces."""
        fetched = [self._fetched(x, index) for x in self._xs if on_host(x)]
        shards = [self._entry(self._xs[i], dtype, index) for i, dtype in self._dtypes.items()]
        # XLA's scheduler then overlaps the reductions with the first products of an iteration, and
        # the gathers with the last. On jax 0.12 it else ran the gathers where nothing hides them.
        size = max((gradient.value.size for gradient in done), default=0)
        largest = [gradient for gradient in done if gradient.value.size == size]
        held = order.hold_until(shards, largest, self._gatherer.constrain)
        pairs = zip(self._dtypes, held, strict=True)
        return [*fetched, *(self._gathered(i, x) for i, x in pairs if isinstance(x, Shard))]

    def _fetched(self, x: Shard | HostStack, index: jax.Array | int) -> jax.Array:
        value = entry(x.value, index)
        spec = None if isinstance(x, HostStack) else x.spec[1:]
        return value if spec is None else self._gatherer.constrain(value, spec)

    def _entry(self, x: Shard, dtype: jnp.dtype, index: jax.Array | int) -> Shard:
        spec, mesh = layout.with_leaves(x.spec[1:], x.spec), self._gatherer.mesh
        master, own_dtype = x.master, x.value.dtype
        names = {name for entry in x.spec for name in layout.axes(entry)}
        is_even = layout.padded_shape(x.value.shape, x.spec, mesh) == x.value.shape
        # Parts of an axis are axes of another mesh.
        if master is None or not is_even or not names <= {*mesh.axis_names}:
            value = lax.dynamic_index_in_dim(x.value, index, keepdims=False)
            value = self._gatherer.constrain(value, spec).astype(dtype)
            return self._as_codes(Shard(value, spec, gathering=x.gathering), index)

        def own(stack: jax.Array, index: jax.Array) -> jax.Array:
            # As a vector: XLA would give the stack the layout in which the layer is gathered, with
            # the sharded dimension first, and hold a transposed copy of it through both passes.
            layers = stack.reshape(stack.shape[0], -1)
            layer = lax.dynamic_index_in_dim(layers, index, keepdims=False)
            return layer.astype(own_dtype).astype(dtype).reshape(stack.shape[1:])

        specs = PartitionSpec(*x.spec), PartitionSpec()
        result = PartitionSpec(*spec)
        run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=result, check_vma=False)
        layer = Shard(run(master, jnp.asarray(index)), spec, gathering=x.gathering)
        return self._as_codes(layer, index)

    def _as_codes(self, layer: Shard, index: jax.Array | int) -> Shard:
        """Returns the fp8 codes of a layer that products multiply in fp8; others unchanged."""
        if (scales := layer.gathering.scales) is None:
            return layer
        scale = lax.dynamic_index_in_dim(scales, index, keepdims=False)
        return layer.with_value(encode(layer.value, scale, E4M3))

    def _gathered(self, i: int, shard: Shard) -> jax.Array:
        body, quantized = jaxprs.open_jaxpr(self._loop.body)[0], shard.gathering.quantized
        with self._gatherer.ledger.used_in(body, body.invars[self._loop.first_stack + i]):
            if shard.gathering.scales is not None:
                return self._gatherer.gather_codes(shard.value, shard.spec)
            return self._gatherer.all_gather(shard.value, shard.spec, quantized=quantized)

    def first(self) -> list[jax.Array]:
        """Reads the entries that the first iteration needs."""
        with self._gatherer.ledger.place(decisions.BEFORE_LOOP, "the first iteration's layer"):
            return self.read(self._loop.order[0])

    def rest(self) -> list[object]:
        """Returns the stacks that the loop itself slices: those on the devices."""
        return [x.value if isinstance(x, Shard) else x for x in self._xs if not on_host(x)]

    def merged(self, come: Sequence[jax.Array], rest: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns one iteration's entries of all stacks, sharded, in the order of ``xs``."""
        prefetched, sliced = iter(come), iter(rest)
        return [next(prefetched) if on_host(x) else next(sliced) for x in self._xs]

    def unsharded(self, come: Sequence[jax.Array]) -> list[jax.Array | None]:
        """Returns, for each stack, the unsharded entry that was gathered ahead, or its fp8 codes;
        None for others."""
        unsharded: list[jax.Array | None] = [None] * len(self._xs)
        for i, array in self._gathered_arrays(come):
            # Otherwise XLA may carry the shard and gather in the iteration that uses the result.
            spec = layout.without(self._xs[i].spec[1:], self._gatherer.axis)
            unsharded[i] = self._gatherer.constrain(array, spec)
        return unsharded

    def _gathered_arrays(self, come: Sequence[jax.Array]) -> Iterable[tuple[int, jax.Array]]:
        """Returns the gathered arrays among those read ahead, with the positions of their
        stacks."""
        return zip(self._dtypes, come[len(come) - len(self._dtypes) :], strict=True)

    def hold(self, carry: list[jax.Array], coming: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the carried values of an iteration that reduces no gradients. If a rematerialised
        block runs again in the loop, the largest of them, the cotangents, wait for the gathered
        arrays."""
        # XLA then overlaps the gather with the block's forward pass. Otherwise the gather would
        # come after all reduce-scatters, with nothing left to overlap.
        last = self.last(coming) if self._holds else None
        return carry if last is None else order.hold_largest(carry, last)

    def last(self, coming: Sequence[jax.Array]) -> jax.Array | None:
        """Returns the last gathered array that is unsharded on every device; None if there is
        none."""
        axis, gathered = self._gatherer.axis, self._gathered_arrays(coming) if coming else ()
        replicated = [x for i, x in gathered if not any(layout.without(self._xs[i].spec, axis))]
        return replicated[-1] if replicated else None


def decide_prefetches(
    loop: ScanParts,
    xs: Sequence[object],
    gatherer: Gatherer,
    rows: RowDimensions,
    *,
    gathers: bool,
) -> dict[int, jnp.dtype]:
    """Returns, by position, the dtypes of the stacks whose layers a scan gathers one iteration
    ahead.

    Args:
      loop: The scan.
      xs: The stacks that it reads, see :class:`PrefetchedStacks`.
      gatherer: Gathers parameters.
      rows: The dimensions along which rows of the batch lie.
      gathers: Whether all parameters on the devices are gathered ahead; otherwise only those that
        the loop gathers and stacks, see :mod:`zerojax.collectives.stacks`.
    """
    # A layer that an iteration may not need, or needs only rows of, must not be sent in each.
    uses = Uses(gatherer, rows, surely=True)
    dtypes = {
        i: gathered_dtype(loop, i, x, uses)
        for i, x in enumerate(xs)
        if is_on_devices(x, gatherer.axis) and not x.is_rounded and (gathers or x.gathering.by_loop)
    }
    return {i: dtype for i, dtype in dtypes.items() if dtype is not None}


def gathered_dtype(loop: ScanParts, i: int, x: Shard, uses: Uses) -> jnp.dtype | None:
    """Returns the dtype in which a scan gathers ahead the layers of ``x``, stack ``i`` of those it
    reads; None if it does not. ``uses`` has ``surely`` set."""
    if loop.length < LEAST:
        return None
    body, _ = jaxprs.open_jaxpr(loop.body)
    spec = layout.with_leaves(x.spec[1:], x.spec)
    needed = uses.dtypes(body, loop.operands(body.invars)[2][i], spec)
    # The narrowest of several; the dtype of the stack if the body widens it before use.
    return min(*needed, x.value.dtype, key=_bytes) if needed else None


def _bytes(dtype: jnp.dtype) -> tuple[int, str]:
    """Returns the bytes of an element, and the name, which orders dtypes of equal size."""
    return dtype.itemsize, dtype.name
