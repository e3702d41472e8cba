"""Updates of some of the parameters, and gradients in another tree than the parameters.

Flax's FP8 layers keep their scales beside the trained parameters, and ``optax.lookahead`` keeps two
copies of the parameters, only one of which has gradients.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import optax
from jax import lax
from jax.tree_util import KeyPath, PyTreeDef

from zerojax.plan.state_sharding import Plan
from zerojax.step.view import Constrain, View
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import PyTree

FULL_TREE_ONLY = (
    "the optimizer gets gradients of another structure than state.params, which offload does not "
    "support. Keep in state.params only what the optimizer updates, and the rest in another field "
    "of the state, or train without offload."
)


def to_shards(plan: Plan) -> Constrain:
    """Returns a function that constrains a tree of gradients to the shards of its parameters.

    A gradient belongs to the first parameter of its shape whose path ends with the gradient's path;
    a gradient without such a parameter (that of a single example, say) is left to XLA.
    """
    paths = jax.tree_util.tree_leaves_with_path(plan.shardings().params)
    leaves = [
        (jax.tree_util.keystr(path), leaf.shape, sharding)
        for (path, sharding), leaf in zip(paths, plan.leaves["params"], strict=True)
    ]
    known = {path: (shape, sharding) for path, shape, sharding in leaves}

    def constrain(path: KeyPath, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        of_path = [known[name]] if name in known else []
        ending = (each[1:] for each in leaves if each[0].endswith(name))
        for shape, sharding in itertools.chain(of_path, ending):
            if tuple(x.shape) == tuple(shape):
                return lax.with_sharding_constraint(x, sharding)
        return x

    return lambda tree: jax.tree_util.tree_map_with_path(constrain, tree)


def of_parts(
    tx: optax.GradientTransformationExtraArgs, name: str, start: Parts, sizes: list[int]
) -> optax.GradientTransformationExtraArgs:
    """Extends ``tx``, an optimizer of views, to updates of a subtree of the parameters, and to a
    new state that ``init`` puts into the view that the step begins with.

    Args:
      tx: See :mod:`zerojax.step.view`.
      name: The step's name.
      start: The state that the step sees.
      sizes: A list to which each update appends its number of gradients.
    """
    full_structure: PyTreeDef = jax.tree.structure(start.params)

    def init(params: PyTree) -> PyTree:
        opt_state = tx.init(params)
        view = start.opt_state
        return view.around(opt_state.inner) if isinstance(view, View) else opt_state

    def update(
        grads: PyTree, view: View, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, View]:
        sizes.append(len(jax.tree.leaves(grads)))
        if not isinstance(view, View):  # an optimizer that zerojax has not wrapped
            return tx.update(grads, view, params, **extra)
        structure: PyTreeDef = jax.tree.structure(grads if params is None else params)
        if view.grads is not None and jax.tree.structure(grads) != full_structure:
            raise NotImplementedError(FULL_TREE_ONLY)
        if view.masters is None or structure == full_structure:
            return tx.update(grads, view, params, **extra)
        part = _Part(name, start.params, structure)
        part_view = dataclasses.replace(
            view, masters=part.of(view.masters), compute=part.of(view.compute)
        )
        updates, after = tx.update(grads, part_view, params, **extra)
        compute = None if after.compute is None else part.put(after.compute, view.compute)
        return updates, dataclasses.replace(
            after, masters=part.put(after.masters, view.masters), compute=compute
        )

    return optax.GradientTransformationExtraArgs(init, update)


class _Part:
    """The only subtree of the parameters that has a given structure."""

    def __init__(self, name: str, params: PyTree, form: PyTreeDef) -> None:
        self._form = form
        nodes, tree = jax.tree.flatten(params, is_leaf=self._is_it)
        self._tree: PyTreeDef = tree
        found = [i for i, x in enumerate(nodes) if self._is_it(x)]
        if len(found) != 1:
            raise NotImplementedError(
                f"{name} updates only some parameters, which are not one subtree of state.params "
                "with a structure of its own. Under bf16, fp16 or zero_hpz_partition_size, keep in "
                "state.params only what the optimizer updates, and the rest in another field of "
                "the state."
            )
        (self._at,) = found

    def _is_it(self, x: PyTree) -> bool:
        return bool(jax.tree.structure(x) == self._form)

    def of(self, tree: PyTree) -> PyTree:
        """Returns the subtree of a tree that has the structure of the parameters."""
        return self._tree.flatten_up_to(tree)[self._at]

    def put(self, part: PyTree, tree: PyTree) -> PyTree:
        """Returns the tree with another subtree."""
        nodes = self._tree.flatten_up_to(tree)
        nodes[self._at] = part
        return jax.tree.unflatten(self._tree, nodes)
