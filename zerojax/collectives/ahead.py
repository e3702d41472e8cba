"""What a loop has ready one iteration ahead: entries from host memory, and parameters whole.

A loop over layers takes its parameters as slices of stacks. An all-gather in the iteration that
uses its result would be waited for. So each iteration carries the parameters of its own layer
whole, and gathers those of the next layer while it computes. One layer more is held; and one more
is gathered, since the last iteration gathers its own again, which nobody uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.collectives import decisions, order, residuals
from zerojax.collectives.gathering import Gatherer, is_sharded
from zerojax.collectives.host import entry, on_host
from zerojax.collectives.shard import HostStack, Shard
from zerojax.collectives.uses import Uses
from zerojax.plan import layout
from zerojax.xla import jaxprs

LEAST = 16
"""The fewest iterations of a loop that gathers ahead: with fewer, one gather more is too many."""


class Ahead:
    """The stacks that a loop reads, some of them one iteration ahead.

    Args:
      eqn: The scan.
      xs: What it reads, stacked along the first dimension, see
        :class:`zerojax.collectives.entries.Entries`. A :class:`Shard` or :class:`HostStack` in host
        memory is fetched ahead.
      dtypes: By position, the dtype of what is gathered ahead, see :func:`decide`.
      gatherer: Gathers parameters.
    """

    def __init__(
        self, eqn: Any, xs: Sequence[Any], dtypes: Mapping[int, jnp.dtype], gatherer: Gatherer
    ) -> None:
        self._xs, self._dtypes, self._gatherer = xs, dtypes, gatherer
        self._length, self._reverse = jaxprs.param(eqn, "length"), jaxprs.param(eqn, "reverse")
        self._holds = residuals.holds_block(eqn)

    def order(self) -> jax.Array | None:
        """int [length], for each iteration the one that comes after it; its own for the last.
        None where nothing is read ahead."""
        if not any(map(on_host, self._xs)) and not self._dtypes:
            return None
        step = -1 if self._reverse else 1
        return jnp.clip(jnp.arange(self._length) + step, 0, self._length - 1)

    def read(self, index: Any) -> list[jax.Array]:
        """The entries at ``index``, on the device or whole, of the stacks that are read ahead."""
        fetched = [self._fetched(x, index) for x in self._xs if on_host(x)]
        gathered = (self._gathered(self._xs[i], d, index) for i, d in self._dtypes.items())
        return [*fetched, *gathered]

    def _fetched(self, x: Any, index: Any) -> jax.Array:
        value = entry(x.value, index)
        spec = None if isinstance(x, HostStack) else x.spec[1:]
        return value if spec is None else self._gatherer.constrain(value, spec)

    def _gathered(self, x: Shard, dtype: jnp.dtype, index: Any) -> jax.Array:
        shard = lax.dynamic_index_in_dim(x.value, index, keepdims=False)
        shard = self._gatherer.constrain(shard, x.spec[1:])
        quantized = x.gathering.quantized
        return self._gatherer.whole(shard.astype(dtype), x.spec[1:], quantized=quantized)

    def first(self) -> list[jax.Array]:
        """What the first iteration needs."""
        with self._gatherer.ledger.place(decisions.BEFORE_LOOP, "the first iteration's layer"):
            return self.read(self._length - 1 if self._reverse else 0)

    def rest(self) -> list[Any]:
        """What the loop itself reads: the stacks that are on the device."""
        return [x.value if isinstance(x, Shard) else x for x in self._xs if not on_host(x)]

    def merged(self, come: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """One iteration's entries of all stacks as they lie, in the order of ``xs``."""
        came, here = iter(come), iter(rest)
        return [next(came) if on_host(x) else next(here) for x in self._xs]

    def wholes(self, come: Sequence[jax.Array]) -> list[jax.Array | None]:
        """Those of them that were gathered ahead; None for the others."""
        wholes: list[jax.Array | None] = [None] * len(self._xs)
        for i, whole in self._whole(come):
            # Otherwise XLA may carry the shard and gather in the iteration that uses the result.
            spec = layout.without(self._xs[i].spec[1:], self._gatherer.axis)
            wholes[i] = self._gatherer.constrain(whole, spec)
        return wholes

    def _whole(self, come: Sequence[jax.Array]) -> Iterable[tuple[int, jax.Array]]:
        """What was gathered among what was read ahead, with its position."""
        return zip(self._dtypes, come[len(come) - len(self._dtypes) :], strict=True)

    def hold(self, carry: list[Any], coming: Sequence[jax.Array]) -> list[Any]:
        """The carried values of an iteration, whose cotangents wait for what was read ahead where a
        rematerialised block runs again. XLA hides the gather behind the block's forward pass then;
        otherwise it would come after all reduce-scatters, with nothing left to hide it."""
        last = self.last(coming) if self._holds else None
        return carry if last is None else order.hold_largest(carry, last)

    def last(self, coming: Sequence[jax.Array]) -> jax.Array | None:
        """The last array gathered of what was read ahead, if it lies whole on every device."""
        axis, gathered = self._gatherer.axis, self._whole(coming)
        whole = [x for i, x in gathered if not any(layout.without(self._xs[i].spec, axis))]
        return whole[-1] if whole else None


def decide(
    eqn: Any, xs: Sequence[Any], gatherer: Gatherer, *, gathers: bool
) -> dict[int, jnp.dtype]:
    """The stacks whose layers a scan gathers one iteration ahead, by position: the dtype in which
    it does.

    Args:
      eqn: The scan.
      xs: What it reads, see :class:`Ahead`.
      gatherer: Gathers parameters.
      gathers: Whether all parameters on the devices are gathered ahead; otherwise those that the
        loop gathers and stacks, see :mod:`zerojax.collectives.filled`.
    """
    uses = Uses(gatherer.mesh, gatherer.axis, surely=True)
    dtypes = {
        i: gathered_dtype(eqn, i, x, uses)
        for i, x in enumerate(xs)
        if _is_shard(x, gatherer.axis) and (gathers or x.gathering.by_loop)
    }
    return {i: dtype for i, dtype in dtypes.items() if dtype is not None}


def _is_shard(x: Any, axis: str) -> bool:
    """Whether it is a parameter on the devices, of which nothing is gathered yet."""
    sharded = isinstance(x, Shard) and is_sharded(x.spec, axis)
    return sharded and not x.gathering.host and not x.is_rounded


def gathered_dtype(eqn: Any, i: int, x: Shard, uses: Uses) -> jnp.dtype | None:
    """The dtype in which a scan gathers the layers of ``x``, stack ``i`` of those that it reads,
    ahead; None where it does not. ``uses`` are sure ones."""
    if jaxprs.param(eqn, "length") < LEAST:
        return None
    body, _ = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))
    needed = uses.dtypes(body, body.invars[sum(jaxprs.scan_counts(eqn)) + i], x.spec[1:])
    # The narrowest of several; its own where it is widened before.
    return min(*needed, x.value.dtype, key=_bytes) if needed else None


def _bytes(dtype: jnp.dtype) -> tuple[int, str]:
    """Of an element; by name where they are as many."""
    return dtype.itemsize, dtype.name
