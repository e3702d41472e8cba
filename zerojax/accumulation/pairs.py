"""A step traced on a micro-batch beside the same step traced on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "zerojax", "importlib", "contextlib", "functools")


class Pair(NamedTuple):
    """One equation in both.

    Attributes:
      whole: on the whole batch.
      micro: on a micro-batch; None where a micro-batch of one row needs no such equation.
    """

    whole: Any
    micro: Any


class UnevenError(Exception):
    """The step's program depends on the number of rows; the argument says where."""


def pairs(whole: Sequence[Any], micro: Sequence[Any]) -> Iterator[Pair]:
    """The equations of both programs, matched.

    Raises:
      UnevenError: they differ in more than shapes.
    """
    left = iter(micro)
    here = next(left, None)
    for eqn in whole:
        if here is not None and _alike(eqn, here):
            yield Pair(eqn, here)
            here = next(left, None)
        elif eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.ndim == len(
            eqn.params["shape"]
        ):
            yield Pair(eqn, None)  # from one row to one row
        else:
            raise UnevenError(where(eqn))
    if here is not None:
        raise UnevenError(where(here))


def _alike(one: Any, other: Any) -> bool:
    return (one.primitive, len(one.invars), len(one.outvars)) == (
        other.primitive,
        len(other.invars),
        len(other.outvars),
    )


def scaled(whole: Any, micro: Any) -> list[int]:
    """Dimensions in which an array grows with the number of rows."""
    shapes = zip(whole.shape, micro.shape, strict=True)
    return [i for i, (a, b) in enumerate(shapes) if a != b]


def where(eqn: Any) -> str:
    """The equation's primitive, and the user's line that makes it where that is known."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        parts = PurePath(frame.file_name).parts
        packaged = "site-packages" in parts or "dist-packages" in parts
        if not packaged and not any(p in _LIBRARIES for p in parts[-3:-1]):
            return f"{eqn.primitive.name} at {PurePath(frame.file_name).name}:{frame.line_num}"
    return eqn.primitive.name
