"""The stacks of layers that a loop reads and computes, some of them shards.

Parameters that stay gathered (at stages 1 and 2, and at stage 3 those of
``stage3_max_live_parameters``) could be gathered before the step begins, where nothing hides the
gathers. A stack of layers that the forward loop reads layer by layer is gathered by that loop
instead, one layer ahead, see :mod:`zerojax.collectives.prefetch`; the loop stacks the gathered
layers for the backward loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.collectives.gathering import is_sharded, plain
from zerojax.collectives.narrow import narrowest, widened, widenings
from zerojax.collectives.prefetch import PrefetchedStacks
from zerojax.collectives.quantization import decode
from zerojax.collectives.shard import FilledStack, Gathering, MovedStack, Shard, UnshardedCopy
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla.types import Value


class _Form(NamedTuple):
    """A stacked shard: the spec of an entry, the widening casts to run after the loop, the gathered
    stack if it is known, also in the layout that a loop reads, and whether it is quantized."""

    spec: Spec
    dtypes: tuple[np.dtype, ...]
    gathered: UnshardedCopy | None
    quantized: bool


class LoopStacks:
    """The stacks that a loop reads and computes, some of them shards.

    A stack that was widened is read in its narrow dtype, and widened entry by entry. A result that
    is a widened shard is stacked in its narrow dtype, too. If the unsharded copy of a result is an
    entry of a stack gathered in advance, the copy is not stacked a second time.

    Args:
      xs: the stacks that the loop reads, along the first dimension.
      axis: the axis over which ZeRO shards.

    Attributes:
      read: the stacks that the loop reads in place of ``xs``.
      rounded: for each stack its copy gathered in a narrower dtype, or the scales of its layers in
        fp8, which the loop reads as well, or None.
    """

    def __init__(self, xs: Sequence[object], axis: str) -> None:
        self._xs, self._axis = xs, axis
        self.read: list[object] = [narrowest(x) for x in xs]
        self.rounded: list[jax.Array | MovedStack | None] = [_as_read(x) for x in xs]
        self._gathered_entries: list[tuple[object, Any]] = []
        self._brief = False  # whether an iteration has gathered arrays that are freed at its end
        self._forms: dict[int, _Form] = {}

    def operands(
        self,
        entries: Sequence[jax.Array],
        rounded: Sequence[jax.Array | None],
        prefetched: Sequence[jax.Array | None],
    ) -> list[Shard | jax.Array]:
        """Returns one iteration's operands, from its entries of ``read`` and ``rounded``, and from
        the entries that were prefetched, with None for the others; see
        :class:`zerojax.collectives.prefetch.PrefetchedStacks`."""
        self._gathered_entries = list(zip(rounded, self._xs, strict=True))
        self._brief = any(x is not None for x in prefetched)
        return list(map(self._operand, self._xs, entries, rounded, prefetched))

    def _operand(self, x: object, entry: Value, rounded: Value, prefetched: Value) -> Value:
        if not isinstance(x, Shard):
            return entry
        spec = layout.with_leaves(x.spec[1:], x.spec)
        shard, known = x.with_value(entry, spec), prefetched if rounded is None else rounded
        if rounded is not None and _scales(x) is not None:
            known = None if prefetched is None else decode(prefetched, rounded, entry.dtype)
            shard = shard.with_gathering(scale=rounded, scales=None)
        shard = widened(shard.with_copy(known), widenings(x))
        return shard if is_sharded(x.spec, self._axis) else shard.value

    def stack(self, i: int, y: object) -> object:
        """Returns the array that the loop stacks for its result ``i``: for a shard its narrowest
        form, or the unsharded copy if it is not an entry of a gathered stack, nor freed."""
        if not isinstance(y, Shard):
            return y
        gathered = None
        if y.unsharded is not None:
            source = next((x for entry, x in self._gathered_entries if entry is y.unsharded), None)
            if source is None and not self._brief:
                return y.unsharded
            gathered = None if source is None else source.gathered
        self._forms[i] = _Form(y.spec, widenings(y), gathered, y.gathering.quantized)
        return plain(narrowest(y))

    def stacked(self, i: int, y: jax.Array) -> Shard | jax.Array:
        """Returns the stack of result ``i``, from the array that the loop has stacked."""
        if i not in self._forms:
            return y
        form = self._forms[i]
        gathering = Gathering(quantized=form.quantized)
        spec = layout.with_leaves((None, *form.spec), form.spec)
        return widened(Shard(y, spec, form.gathered, gathering), form.dtypes)


def _scales(x: object) -> jax.Array | None:
    """Returns the scales of a stack in fp8; None for other values."""
    source = narrowest(x)
    return source.gathering.scales if isinstance(source, Shard) else None


def _as_read(x: object) -> jax.Array | MovedStack | None:
    """Returns the copy of a stack that was gathered in a narrower dtype, in the layout that a loop
    reads, or the scales of its layers; None if there are none."""
    if (scales := _scales(x)) is not None:
        return scales
    if not isinstance(x, Shard) or x.gathered is None or not x.is_rounded:
        return None
    return x.gathered.array if x.gathered.stack is None else x.gathered.stack


class GatheredStacks:
    """The stacks that a loop gathers and stacks.

    Args:
      xs: The stacks that the loop reads.
      dimensions: By position of a stack that the loop gathers, the dimension along which the stack
        is sharded.
      prefetched: The stacks that the loop reads ahead.
    """

    def __init__(
        self,
        xs: Sequence[Any],
        dimensions: Mapping[int, int],
        prefetched: PrefetchedStacks,
    ) -> None:
        self._prefetched, self._dimensions, self._xs = prefetched, dimensions, xs

    def layers(self, come: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the layers that an iteration stacks: those that the previous one has gathered
        for it, in the layout of the collective."""
        if not self._dimensions:
            return []
        unsharded = self._prefetched.unsharded(come)
        chosen = [(x, d) for i, d in self._dimensions.items() if (x := unsharded[i]) is not None]
        return [jnp.moveaxis(x, d - 1, 0) for x, d in chosen]

    def filled(self, stacks: Sequence[jax.Array]) -> list[tuple[Shard, Shard]]:
        """Returns each shard with its gathered version, from the layers that all iterations have
        stacked."""
        pairs = []
        for (i, d), stack in zip(self._dimensions.items(), stacks, strict=True):
            moved, x = FilledStack(stack, d), self._xs[i]
            pairs.append((x, x.with_copy(moved.unsharded, moved).with_gathering(by_loop=False)))
        return pairs
