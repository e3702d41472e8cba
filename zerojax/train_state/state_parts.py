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
      matches: ``matches(objects)`` has, for each of a state's objects, whether a node of a step's
        results is its new value; nothing for objects that are updated in place.
      any_pytree: The state is neither a ``TrainState`` nor NNX objects. Arrays that the caller puts
        into it belong to the caller.
      knows_parameters: Whether the parameters are known; if not, all arrays are in ``parts.rest``,
        and the step updates them itself.
    """

    parts: Parts
    tx: optax.GradientTransformation
    split: Callable[..., Parts]
    close: Callable[[Parts, Any], tuple[Any, ...]]
    key: Any
    specs: tuple[Any, ...]
    write_back: Callable[[tuple[Any, ...], Parts, Any], None] | None = None
    plain: bool = False
    matches: Callable[[tuple[Any, ...]], Sequence[Callable[[Any], bool]]] = lambda objects: ()
    any_pytree: bool = False
    knows_parameters: bool = True

    @property
    def optimizer_in_step(self) -> bool:
        """Whether the step alone has the optimizer that updates ``parts.params``."""
        return self.any_pytree and self.knows_parameters
