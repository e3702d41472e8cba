"""Parts of arrays: a range of a flattened array as boxes, and where two boxes meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Index = tuple[slice, ...]
"""A box: a slice without a step for each dimension."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Index]:
    """The boxes that elements ``start:stop`` of a flattened array (C order) consist of, in order.

    Each is contiguous in the flattened array.

    Example:
      >>> [*boxes((2, 3), 1, 6)]
      [(slice(0, 1, None), slice(1, 3, None)), (slice(1, 2, None), slice(0, 3, None))]
    """
    if start == stop:
        return
    if not shape:
        yield ()
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, begin, end))
        return
    if begin:
        yield from ((slice(first, first + 1), *box) for box in boxes(rest, begin, row))
        first += 1
    if first < last:
        yield (slice(first, last), *whole(rest))
    yield from ((slice(last, last + 1), *box) for box in boxes(rest, 0, end))


def whole(shape: Sequence[int]) -> Index:
    return tuple(slice(0, n) for n in shape)


def shape_of(box: Index) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def meet(one: Index, other: Index) -> Index | None:
    """What is in both; None where nothing is."""
    both = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(s.start >= s.stop for s in both) else both


def moved(box: Index, by: Index, sign: int = 1) -> Index:
    """The box as seen from the whole of which ``by`` is a part; with -1 the other way round."""
    return tuple(
        slice(s.start + sign * b.start, s.stop + sign * b.start)
        for s, b in zip(box, by, strict=True)
    )
