"""A training state taken apart: the form that the rest of zerojax works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optax


class Parts(NamedTuple):
    """The arrays of a training state.

    Attributes:
      params: The parameters that the optimizer updates.
      opt_state: The optimizer's state.
      step: int [], the user's own step counter.
      rest: Everything else that a step hands to the next (batch statistics, PRNG keys, an average
        of the parameters), by name.
    """

    params: Any
    opt_state: Any
    step: Any
    rest: dict[str, Any]


@dataclass(frozen=True)
class OpenedState:
    """A state taken apart, and the way back.

    Attributes:
      parts: The state's arrays.
      tx: The state's optimizer.
      split: ``split(*objects)`` has the arrays of another state of the same kind, for the price of
        reading its fields.
      close: ``close(parts, tx)`` has the objects of a state of this kind with these arrays and
        that optimizer.
      key: Differs between kinds of state; hashable.
      specs: The PartitionSpec that the user's model gives each leaf of ``parts.params``, in
        order; None or empty where the model gives none.
      write_back: ``write_back(objects, parts, tx)`` brings the user's own objects up to date, as
        NNX does; None for a state that is returned.
      plain: The state has not been through zerojax yet, so that its arrays are the caller's.
      matches: For each object whether a node of a step's results is its new value; empty for
        objects that are updated in place.
      any_pytree: Nothing is known of the state: all of it is in ``parts.rest``.
    """

    parts: Parts
    tx: optax.GradientTransformation
    split: Callable[..., Parts]
    close: Callable[[Parts, Any], tuple[Any, ...]]
    key: Any
    specs: tuple[Any, ...]
    write_back: Callable[[tuple[Any, ...], Parts, Any], None] | None = None
    plain: bool = False
    matches: Sequence[Callable[[Any], bool]] = ()
    any_pytree: bool = False
