"""The arguments of a step that are its state: the arguments that the step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from zerojax.devices.mesh import explicit_axes
from zerojax.placement.checks import check_one_copy
from zerojax.plan.places import PINNED
from zerojax.step.call import RearrangedFunction, is_array, is_key
from zerojax.step.jitted import Slot
from zerojax.train_state.bound import is_optimizer_state
from zerojax.train_state.pytree import are_arrays, form_of, has_form
from zerojax.train_state.results import summary, take_out
from zerojax.xla import jaxprs
from zerojax.xla.types import PyTree


def find_state(
    function: RearrangedFunction,
    given: Mapping[Slot, PyTree],
    batch: Sequence[Slot],
    text: Callable[[Sequence[Slot]], str],
) -> list[Slot]:
    """Returns the arguments whose tree, shapes and dtypes a function has among its results.

    Containers of arrays count at any position. Single arrays count if no container is returned, or
    if the batch is named; numbers and random keys do not count.

    Args:
      function: The step, called with all arguments that may be the state in the state's place.
      given: Its arguments by slot.
      batch: The arguments that are the batch, if it is named.
      text: Describes arguments for messages.

    Raises:
      TypeError: The step returns no argument, or only some of those of equal form, or an array
        which may be the state's or the batch's.
      ValueError: The state has a copy for each device.
    """
    name, free = function.__name__, function.signature.state

    def by_name(slots: Sequence[Slot]) -> dict[str, PyTree]:
        return {text([slot]): given[slot] for slot in slots}

    try:
        results = _shapes_of_results(function, given)
    except (TypeError, ValueError) as error:  # of shapes with an extra dimension, say
        check_one_copy(by_name(free), error)
        _note_numbers(by_name(free), error)
        raise
    candidates = [slot for slot in free if slot not in batch and _may_be_state(given[slot])]
    forms = {slot: form_of(given[slot]) for slot in candidates}
    found, _ = take_out(results, [has_form(forms[slot]) for slot in candidates])
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
    if containers and not batch:
        alike = [slot for slot in alike if not _is_bare(given[slot])]
        # The single arrays belong to the state, or a result has the batch's form by chance, as an
        # autoencoder's has. The one array that can be the batch is the batch.
        rows = [x for x in free if may_be_batch(given[x]) and not is_key(given[x])]
        is_batch = len(single) == 1 and [x for x in rows if x not in containers] == single
        slots, ambiguous = containers, [] if is_batch else before
    else:
        slots, ambiguous = [slot for slot in back if slot in (*containers, *before)], []
    check_one_copy(by_name(slots))
    if unclear := alike or ambiguous:
        raise TypeError(
            f"{name} returns results with the tree, shapes and dtypes of {text(unclear)}, which "
            f"may be its state or not. Name the state: zero({name}, state_argnums=(...)), or the "
            "batch by batch_argnums."
        )
    if not slots:
        raise TypeError(
            f"{name} returns {summary(results)}, and none of its arguments ({text(free)}) with "
            "the same tree, shapes and dtypes. Return the new state, or name it by state_argnums."
            + _other_dtypes(results, by_name(candidates))
        )
    return slots


def _note_numbers(arguments: Mapping[str, PyTree], error: Exception) -> None:
    """Adds to JAX's error about a traced number the fields of arguments that may be meant."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    numbers = [jax.tree_util.keystr(at) for at, x in leaves if isinstance(x, int | float)]
    if numbers and (isinstance(error, jax.errors.JAXTypeError) or "concrete" in str(error)):
        error.add_note(
            f"zerojax traces the numbers {', '.join(numbers[:3])}, as jax.jit does. Make settings "
            "static: eqx.field(static=True), flax.struct.field(pytree_node=False), or "
            "static_argnums for an argument."
        )


def _other_dtypes(results: PyTree, candidates: Mapping[str, PyTree]) -> str:
    """Describes the leaves of arguments that come back with other dtypes only."""
    forms = [form_of(x, dtypes=False) for x in candidates.values()]
    found, _ = take_out(results, [has_form(form, dtypes=False) for form in forms])
    changes = [
        f"{name}{jax.tree_util.keystr(path)} comes back as {jnp.result_type(new)}, and was "
        f"{jnp.result_type(old)}"
        for i, (name, given) in enumerate(candidates.items())
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(found.get(i)), strict=False
        )
        if is_array(old) and jnp.result_type(old) != jnp.result_type(new)
    ]
    return f" {'; '.join(changes[:3])}: cast it back in the step." if changes else ""


def _shapes_of_results(function: RearrangedFunction, given: Mapping[Slot, PyTree]) -> PyTree:
    free = function.signature.state
    leaves, tree = jax.tree.flatten([given[slot] for slot in free])
    traced = [
        is_array(x) and array
        for slot in free
        for x, array in zip(jax.tree.leaves(given[slot]), are_arrays(given[slot]), strict=True)
    ]

    def run(arrays: list[jax.Array]) -> list[ArrayLike]:
        remaining = iter(arrays)
        pairs = zip(leaves, traced, strict=True)
        filled = jax.tree.unflatten(tree, [next(remaining) if array else x for x, array in pairs])
        results = function(*filled, (), *(given[slot] for slot in function.signature.further))
        untraced[:] = [None if is_array(x) else x for x in jax.tree.leaves(results)]
        returned.append(jax.tree.structure(results))
        return [x for x in jax.tree.leaves(results) if is_array(x)]

    untraced: list[object] = []
    returned: list[PyTreeDef] = []
    shapes = iter(jax.eval_shape(run, [*map(computed, compress(leaves, traced))]))
    return jax.tree.unflatten(returned[-1], [next(shapes) if x is None else x for x in untraced])


def computed(x: Any) -> object:
    """Returns the input of a trace: for an array in host memory, or of a mesh with other explicit
    axes than the context's, only its shape and dtype."""
    sharding, context = getattr(x, "sharding", None), jax.sharding.get_abstract_mesh()
    if isinstance(sharding, NamedSharding) and not context.empty:
        other = explicit_axes(sharding.mesh) != explicit_axes(context)
    else:
        other = False
    # In a trace JAX refuses operands in two memory spaces; a step may combine all of its state.
    return jaxprs.like(x) if other or getattr(sharding, "memory_kind", None) == PINNED else x


def _may_be_state(x: PyTree) -> bool:
    if _is_bare(x):
        return may_be_batch(x) and not is_key(x)
    return any(map(is_array, jax.tree.leaves(x)))


def _is_bare(x: PyTree) -> bool:
    return jax.tree_util.all_leaves([x])


def may_be_batch(x: PyTree) -> bool:
    """Returns whether an argument has an array that is not a scalar. An optimizer's state is never
    the batch, even if it does not come back in its old form, because the first update extends it.
    """
    leaves = jax.tree.leaves(x, is_leaf=is_optimizer_state)
    return any(is_array(leaf) and np.ndim(leaf) for leaf in leaves)
