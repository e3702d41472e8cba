"""The shards that a loop takes entry by entry, and those that it stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from zerojax.collectives.gathering import is_sharded, plain
from zerojax.collectives.shard import Gathered, Gathering, MovedStack, Shard
from zerojax.collectives.widening import narrowest, widened, widenings
from zerojax.plan.layout import Spec


class _Form(NamedTuple):
    """A stacked shard: the spec of an entry, the widening casts to be done after the loop, and the
    array that is the stack gathered, if one is known, and as a loop reads it."""

    spec: Spec
    dtypes: tuple[Any, ...]
    gathered: Gathered | None
    quantized: bool


class Entries:
    """The stacks that a loop reads and makes, some of them shards.

    A stack that was widened is read as what was cast, and widened entry by entry. A result that is
    a widened shard is stacked likewise, and one that is an entry gathered in advance is not stacked
    a second time.

    Args:
      xs: what the loop reads, stacked along the first dimension.
      axis: the axis over which ZeRO shards.

    Attributes:
      read: what the loop reads in place of ``xs``.
      rounded: for each of them the stack gathered rounded, or None; to be read as well.
    """

    def __init__(self, xs: Sequence[Any], axis: str) -> None:
        self._xs, self._axis = xs, axis
        self.read = [narrowest(x) for x in xs]
        self.rounded = [_as_read(x) for x in xs]
        self._whole: list[tuple[Any, Any]] = []
        self._brief = False  # whether an iteration has something whole that dies with it
        self._forms: dict[int, _Form] = {}

    def operands(
        self, entries: Sequence[Any], rounded: Sequence[Any], ahead: Sequence[Any]
    ) -> list[Any]:
        """One iteration's operands, of its entries of ``read`` and ``rounded``, and those that were
        gathered ahead, see :class:`zerojax.collectives.ahead.Ahead`; None for the others."""
        self._whole = list(zip(rounded, self._xs, strict=True))
        self._brief = any(x is not None for x in ahead)
        known = [a if r is None else r for r, a in zip(rounded, ahead, strict=True)]
        return list(map(self._operand, self._xs, entries, known))

    def _operand(self, x: Any, entry: jax.Array, known: jax.Array | None) -> Any:
        if not isinstance(x, Shard):
            return entry
        shard = widened(x.with_value(entry, x.spec[1:]).with_copy(known), widenings(x))
        return shard if is_sharded(x.spec, self._axis) else shard.value

    def stack(self, i: int, y: Any) -> Any:
        """What the loop stacks of its result ``i``; nothing where the stack exists."""
        if not isinstance(y, Shard):
            return y
        gathered = None
        if y.whole is not None:
            of = next((x for entry, x in self._whole if entry is y.whole), None)
            if of is None and not self._brief:
                return y.whole
            gathered = None if of is None else of.gathered
        self._forms[i] = _Form(y.spec, widenings(y), gathered, y.gathering.quantized)
        return plain(narrowest(y))

    def stacked(self, i: int, y: jax.Array) -> Any:
        """The stack of result ``i``, given what the loop has made."""
        if i not in self._forms:
            return y
        form = self._forms[i]
        how = Gathering(quantized=form.quantized)
        return widened(Shard(y, (None, *form.spec), form.gathered, how), form.dtypes)


def _as_read(x: Any) -> jax.Array | MovedStack | None:
    """A stack gathered rounded, in the form that a loop reads."""
    if not isinstance(x, Shard) or x.gathered is None or not x.is_rounded:
        return None
    return x.gathered.array if x.gathered.stack is None else x.gathered.stack
