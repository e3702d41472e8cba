"""The arguments of a step that are its state: those that come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zerojax.step.call import Constant, is_array
from zerojax.step.jitted import Slot
from zerojax.train_state.pytree import Like
from zerojax.train_state.results import take_out


def find_state(
    function: Callable[..., Any], given: Mapping[Slot, Any], free: Sequence[Slot]
) -> tuple[list[Slot], Any]:
    """Finds the arguments whose tree, shapes and dtypes come back among a function's results.

    An argument behind the batch counts where it is a container: a single array may have the shape
    of a result by chance. The batch is the first argument that does not come back.

    Args:
      function: The step.
      given: Its arguments by position and name.
      free: Those that may be the state.

    Returns:
      The state's arguments in order, and the shapes of the function's results.
    """
    dynamic = {slot: x for slot, x in given.items() if slot in free}
    leaves, tree = jax.tree.flatten(dynamic)
    arrays = [x for x in leaves if is_array(x)]

    def run(arrays: list[Any]) -> Any:
        left = iter(arrays)
        filled = jax.tree.unflatten(tree, [next(left) if is_array(x) else x for x in leaves])
        both = {slot: x.value if isinstance(x, Constant) else x for slot, x in given.items()}
        both |= filled
        args = [both[i] for i in range(sum(isinstance(slot, int) for slot in both))]
        return function(*args, **{k: x for k, x in both.items() if isinstance(k, str)})

    results = jax.eval_shape(run, arrays)
    candidates = [slot for slot in free if any(map(is_array, jax.tree.leaves(given[slot])))]
    found, _ = take_out(results, [Like(given[slot]).matches for slot in candidates])
    state = [slot for i, slot in enumerate(candidates) if i in found]
    batch = next((slot for slot in free if slot not in state), None)
    before = free.index(batch) if batch is not None else len(free)
    return [
        slot
        for slot in state
        if free.index(slot) < before or not jax.tree_util.all_leaves([given[slot]])
    ], results


def summary(results: Any) -> str:
    """A few words on what a step returns."""
    kinds = [type(x).__name__ for x in results] if type(results) is tuple else []
    return f"a tuple of {', '.join(kinds)}" if kinds else f"a {type(results).__name__}"
