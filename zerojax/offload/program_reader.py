"""Arrays on disk that a compiled program reads while it runs: the seam to their readers in
:mod:`zerojax.experimental`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from jax.sharding import NamedSharding

from zerojax.collectives.host import Fetchable
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import DISK
from zerojax.xla.types import PyTree

V = TypeVar("V")


class ProgramReader(Protocol):
    """Server of one program's reads."""

    def use(self, values: Sequence[object]) -> None:
        """Sets the arrays of the next run: the arrays of ``values`` that are stored on disk."""

    def check(self, results: PyTree = None) -> None:
        """Waits for the results of a run that reads the disk, and raises its first error."""

    def array(
        self, number: int, shape: Sequence[int], dtype: np.dtype, sharding: NamedSharding
    ) -> Fetchable:
        """Returns an array on disk in a traced program.

        Args:
          number: Index of the array in ``values`` of :meth:`use`.
          shape, dtype: Global shape and dtype.
          sharding: Sharding on the devices.
        """


def beside_disk(values: Sequence[V | None], leaves: Sequence[Leaf]) -> list[V | None]:
    """Returns ``values`` as a program takes them: None in place of each leaf on disk."""
    return [None if leaf.place == DISK else x for x, leaf in zip(values, leaves, strict=True)]
