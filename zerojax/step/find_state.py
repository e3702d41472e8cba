"""The arguments of a step that are its state: those that come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.plan.extra_state import is_optimizer_state
from zerojax.plan.places import PINNED
from zerojax.step.call import Constant, is_array, is_key
from zerojax.step.jitted import Slot
from zerojax.train_state.pytree import are_arrays, form_of, of_form
from zerojax.train_state.results import summary, take_out
from zerojax.xla import jaxprs


class FoundState(NamedTuple):
    """The arguments of a step that are its state.

    Attributes:
      slots: The arguments, in order.
      alike: Arguments of which fewer come back than have their form, so that none is known to be
        the state.
      bare: Single arrays that come back beside containers: of the state, or of the batch, with a
        result of their form by chance.
      returned: A few words on what the step returns.
    """

    slots: Sequence[Slot]
    alike: Sequence[Slot]
    bare: Sequence[Slot]
    returned: str


def find_state(
    function: Callable[..., Any],
    given: Mapping[Slot, Any],
    free: Sequence[Slot],
    batch: Sequence[Slot],
) -> FoundState:
    """Finds the arguments whose tree, shapes and dtypes come back among a function's results.

    Containers of arrays count wherever they stand. Single arrays count where no container comes
    back, or where the batch is named; numbers and random keys do not.

    Args:
      function: The step.
      given: Its arguments by position and name.
      free: Those that may be the state.
      batch: Those that are the batch, where it is named.
    """
    results = _shapes_of_results(function, given, free)
    candidates = [slot for slot in free if slot not in batch and _may_be_state(given[slot])]
    forms = {slot: form_of(given[slot]) for slot in candidates}
    found, _ = take_out(results, [of_form(given[slot]) for slot in candidates])
    back = [slot for i, slot in enumerate(candidates) if i in found]
    alike = [
        slot
        for slot in candidates
        if any(forms[slot] == forms[other] for other in back)
        and any(forms[slot] == forms[other] for other in candidates if other not in back)
    ]
    containers = [slot for slot in back if not _is_bare(given[slot])]
    first = next((slot for slot in free if may_be_batch(given[slot]) and slot not in back), None)
    early = free if first is None else free[: free.index(first)]
    single = [slot for slot in back if slot not in containers]
    before = [slot for slot in single if slot in early] or ([] if containers else single)
    returned = summary(results)
    if containers and not batch:
        alike = [slot for slot in alike if not _is_bare(given[slot])]
        return FoundState(containers, alike, before, returned)
    return FoundState(
        [slot for slot in back if slot in (*containers, *before)], alike, (), returned
    )


def _shapes_of_results(
    function: Callable[..., Any], given: Mapping[Slot, Any], free: Sequence[Slot]
) -> Any:
    leaves, tree = jax.tree.flatten([given[slot] for slot in free])
    traced = [
        is_array(x) and array
        for slot in free
        for x, array in zip(jax.tree.leaves(given[slot]), are_arrays(given[slot]), strict=True)
    ]

    def run(arrays: list[Any]) -> Any:
        left = iter(arrays)
        pairs = zip(leaves, traced, strict=True)
        filled = jax.tree.unflatten(tree, [next(left) if array else x for x, array in pairs])
        both = {slot: x.value if isinstance(x, Constant) else x for slot, x in given.items()}
        both |= dict(zip(free, filled, strict=True))
        args = [both[i] for i in range(sum(isinstance(slot, int) for slot in both))]
        results = function(*args, **{k: x for k, x in both.items() if isinstance(k, str)})
        others[:] = [None if is_array(x) else x for x in jax.tree.leaves(results)]
        returned.append(jax.tree.structure(results))
        return [x for x in jax.tree.leaves(results) if is_array(x)]

    others: list[Any] = []
    returned: list[Any] = []
    shapes = iter(jax.eval_shape(run, [*map(computed, compress(leaves, traced))]))
    return jax.tree.unflatten(returned[-1], [next(shapes) if x is None else x for x in others])


def computed(x: Any) -> Any:
    """What a trace computes with: the shape alone of an array in host memory."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return jaxprs.like(x) if kind == PINNED else x


def _may_be_state(x: Any) -> bool:
    if _is_bare(x):
        return may_be_batch(x) and not is_key(x)
    return any(map(is_array, jax.tree.leaves(x)))


def _is_bare(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])


def may_be_batch(x: Any) -> bool:
    """Whether an argument has an array that is no scalar. An optimizer's state is no batch, also
    where the first update adds to it, so that it does not come back as given."""
    leaves = jax.tree.leaves(x, is_leaf=is_optimizer_state)
    return any(is_array(leaf) and np.ndim(leaf) for leaf in leaves)
