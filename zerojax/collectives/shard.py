"""A parameter that is still cut, and a gradient that is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

from zerojax.collectives.layout import Spec


@dataclass(frozen=True, eq=False)
class Shard:
    """A parameter, or a value of its shape made from it, in the body.

    ``spec`` has one entry a dimension and names the shard axis in one of them. ``whole`` is
    the value gathered in advance (stages 1 and 2), None where it is gathered at each use.
    """

    value: jax.Array
    spec: Spec
    whole: jax.Array | None = None


class Made(NamedTuple):
    """A gradient, reduced over the devices; ``spec`` says how it is cut, if it is."""

    value: jax.Array
    spec: Spec
