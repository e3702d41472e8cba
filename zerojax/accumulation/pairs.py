"""A step traced on a micro-batch beside the same step traced on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zerojax.accumulation.lines import where
from zerojax.xla import jaxprs


class EquationPair(NamedTuple):
    """One equation in both.

    Attributes:
      whole: On the whole batch.
      micro: On a micro-batch; None where a micro-batch of one row needs no such equation.
    """

    whole: Any
    micro: Any


class UnevenError(Exception):
    """The step's program depends on the number of rows; the argument says where.

    Attributes:
      remedy: What to write, where that is known.
    """

    remedy: str | None = None


def pairs(whole: Sequence[Any], micro: Sequence[Any]) -> Iterator[EquationPair]:
    """The equations of both programs, matched.

    Raises:
      UnevenError: They differ in more than shapes.
    """
    left = iter(micro)
    here = next(left, None)
    for eqn in whole:
        if here is not None and _alike(eqn, here):
            yield EquationPair(eqn, here)
            here = next(left, None)
        elif eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.ndim == len(
            jaxprs.param(eqn, "shape")
        ):
            yield EquationPair(eqn, None)  # from one row to one row
        else:
            raise UnevenError(where(eqn))
    if here is not None:
        raise UnevenError(where(here))


def _alike(one: Any, other: Any) -> bool:
    """Whether the equations may differ in the number of rows alone."""
    values = (*one.invars, *one.outvars), (*other.invars, *other.outvars)
    if one.primitive != other.primitive or len(values[0]) != len(values[1]):
        return False
    shapes = [[getattr(v.aval, "shape", ()) for v in side] for side in values]
    return all(
        len(a) == len(b) and all((m and w % m == 0) or w == m for w, m in zip(a, b, strict=True))
        for a, b in zip(*shapes, strict=True)
    )


def scaled(whole: Any, micro: Any) -> list[int]:
    """Dimensions in which an array grows with the number of rows."""
    shapes = zip(whole.shape, micro.shape, strict=True)
    return [i for i, (a, b) in enumerate(shapes) if a != b]
