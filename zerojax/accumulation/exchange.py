"""The protocol of an exchange: a sum of gradients over the devices for which devices keep errors,
the parts of their gradients that they did not send.

This module is the seam between a step and the exchanges in :mod:`zerojax.experimental`. With an
exchange each device runs the step on its own rows, and the partial sums of all gradients are
reduced once an update. The errors are arrays of the optimizer state, ``error`` of
:class:`zerojax.optim.wrap.ZeroOptState`: they are planned, placed, saved and restored like all
others, and a skipped step leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from zerojax.collectives.gathering import Gatherer
from zerojax.optim.wrap import ZeroOptState
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.xla.types import PyTree

Errors = tuple[Any, ...]
"""The errors of one parameter's gradient, arrays or their shapes; empty if the exchange leaves the
gradient to an ordinary sum. Floating arrays of two or more dimensions have one row a device, others
are equal on all devices."""


class Reducer(Protocol):
    """The reduction of one update's gradients from the sums that each device has over its own rows.

    Attributes:
      key: The config key that asks for the exchange.
      after: For each parameter, the errors after the update.
    """

    key: str
    after: list[tuple[jax.Array, ...]]

    def reduced(self, parameter: int, parts: jax.Array, spec: Spec) -> jax.Array:
        """Returns the gradient of a parameter, float32, from the devices' partial sums [devices,
        *shape]."""


class Exchange(Protocol):
    """A way to sum gradients, as the config asks for it.

    Attributes:
      key: The config key that asks for the exchange, for messages.
    """

    key: str

    def applies_to(self, opt_state: PyTree) -> bool:
        """Returns whether the exchange serves a state with this state of its optimizer."""

    def errors_of(self, leaves: Sequence[Leaf]) -> list[Errors]:
        """Returns the shapes and dtypes of each parameter's errors."""

    def reducer(
        self, gatherer: Gatherer, opt_state: ZeroOptState, errors: Sequence[Errors]
    ) -> Reducer:
        """Returns the reduction of one update.

        Args:
          gatherer: Reduces gradients.
          opt_state: The optimizer state before the update.
          errors: The errors before the update, by parameter.
        """
