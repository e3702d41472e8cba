"""The user's step, run on a state taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from zerojax.placement.states import take_apart
from zerojax.step.jitted import name_of
from zerojax.trace.explicit import Types, automatic_update, typed_whole
from zerojax.trace.marks import GRADIENT, count
from zerojax.train_state.state_parts import OpenedState, Parts
from zerojax.xla import hijax


class Alone(NamedTuple):
    """Stands for the results of a step that returns the state alone."""


class Body:
    """The user's function on a state taken apart.

    Args:
      function: The user's step.
      opened: The state, for the way to put one together again.
      once: Why the step may update no more than once, with the remedy; empty where it may.
      types: The types of its arrays, for a step under explicit mesh axes; else None.
    """

    def __init__(
        self, function: Callable[..., Any], opened: OpenedState, once: str, types: Types | None
    ) -> None:
        self.function, self.once, self.types = function, once, types
        self.name = name_of(function)
        self.split, self.close = opened.split, opened.close

    def __call__(
        self, parts: Parts, tx: Any, batch: Any, args: Any, kwargs: Any
    ) -> tuple[Parts, Any]:
        """The state after the step, and what else the step returns.

        Args:
          parts: The state; ``parts.opt_state`` is a :class:`zerojax.step.view.View`.
          tx: The optimizer that the step sees, which takes and returns views.
          batch, args, kwargs: The other arguments of the step.

        Raises:
          TypeError: The step returns something else, or changes the structure of the state.
          ValueError: The step does not update its model.
        """
        if self.types is not None:
            tx, (args, kwargs) = automatic_update(tx), typed_whole((args, kwargs))
        state = self.close(parts, tx)
        if isinstance(state, tuple):  # NNX: updated in place
            out = self.function(*state, batch, *args, **kwargs)
            made = self.split(*state)
            pairs = zip(*map(jax.tree.leaves, (made.params, parts.params)), strict=False)
            if len(state) > 2 and all(new is old for new, old in pairs):
                raise ValueError(
                    f"{self.name} never calls optimizer.update for the model, perhaps for another "
                    "object of the same form: pass the model that is trained before it."
                )
        else:
            new, out = self._state_and_rest(state, self.function(state, batch, *args, **kwargs))
            made = take_apart((new,)).parts
        before: Any = jax.tree.structure(parts)
        after: Any = jax.tree.structure(made)
        if before != after:
            raise TypeError(
                f"{self.name} changed the structure of the state ({_change(parts, made)}): a "
                "training state keeps its fields and their trees from step to step."
            )
        return made, out

    def trace(self, run: Callable[..., Any], parts: Parts, batch: Any) -> tuple[Any, Any]:
        """The jaxpr of ``run(parts, batch)``, which calls this body, and the shapes of its
        results."""
        if self.types is not None:
            return self.types.trace(run, parts, batch)
        return hijax.trace(run, parts, batch)

    def _state_and_rest(self, state: Any, returned: Any) -> tuple[Any, Any]:
        pair = isinstance(returned, tuple) and len(returned) == 2
        if pair and isinstance(returned[0], type(state)):
            return returned  # type: ignore[no-any-return]
        if isinstance(returned, type(state)):
            return returned, Alone()
        raise TypeError(
            f"{self.name} returned {_kind(returned)}: a decorated step returns the pair "
            f"(state, metrics), with a {type(state).__name__} first, or the state alone."
        )

    def check(self, jaxpr: Any, leaves: int) -> None:
        """Looks for the updates in the traced step.

        Args:
          jaxpr: The traced step.
          leaves: Number of the state's parameters.

        Raises:
          ValueError: The step updates never, or more often than it may.
        """
        straight, branched, looped = count(jaxpr, GRADIENT)
        n = (straight + branched) // leaves
        if not n + looped:
            raise ValueError(
                f"{self.name} never updates (state.apply_gradients, or optimizer.update in NNX): "
                "nothing would be trained. Call it with the gradients; put a step that does not "
                "train under jax.jit instead."
            )
        if self.once and (n > 1 or looped):
            times = "in a loop" if looped else f"{n} times"
            raise ValueError(f"{self.name} updates {times}, which cannot be {self.once}.")


def _change(before: Parts, after: Parts) -> str:
    """The paths at which two states differ, a few of them."""

    def paths(parts: Parts) -> dict[str, None]:
        state = {**parts._asdict(), **parts.rest}
        del state["rest"]
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {jax.tree_util.keystr(path): None for path, _ in leaves}

    def some(names: list[str], what: str) -> list[str]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return [f"{', '.join(names[:3])}{more} {what}"] if names else []

    old, new = paths(before), paths(after)
    said = some([x for x in old if x not in new], "left out")
    said += some([x for x in new if x not in old], "added")
    return "; ".join(said) or "containers of other types"


def _kind(x: Any) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {', '.join(type(y).__name__ for y in x)}"
    return f"a {type(x).__name__}"
