"""State beside the parameters: an average, a frozen base, a second network and its moments.

A copy of the parameters is sharded like them. Other arrays of more than ``small_array_size``
elements are sharded by the rule for parameters: all of them at stage 3, those of an optimizer at
stages 1 and 2.
Statistics, counters and PRNG keys are replicated. If zerojax does not know the parameters of a
state, all of its arrays are extra state, and are sharded like parameters, small ones too; pipeline
stages share its stacks of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import stage_size
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.stacks import with_stages
from zerojax.xla.types import Aval, PyTree


class ParameterForm(NamedTuple):
    """The form of the parameters, to recognize their copies.

    Attributes:
      tree: ``jax.tree.structure`` of the parameters.
      leaves: The leaf of each in device memory, in order.
    """

    tree: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]

    def holds(self, value: PyTree, *, shapes: bool = True) -> bool:
        """Returns whether ``value`` is a copy of the parameters, of any dtypes; without ``shapes``,
        of any shapes too, unless all arrays are scalars."""
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(value)
        if structure != self.tree:
            return False
        found = tuple(tuple(x.shape) for x in jax.tree.leaves(value))
        own = tuple(leaf.shape for leaf in self.leaves)
        return found == own if shapes else any(found)


class ExtraState:
    """Plans the state beside the parameters.

    Args:
      params: The form of the parameters.
      mesh, config: See :class:`zerojax.plan.state_sharding.Plan`.
    """

    def __init__(self, params: ParameterForm, mesh: Mesh, config: ZeroConfig) -> None:
        self._params, self._mesh, self._config = params, mesh, config
        self._own: dict[str, Spec] = {}

    def leaves(self, rest: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Returns the leaf of each array, in the form of ``rest``."""
        stages = stage_size(self._mesh)
        if stages > 1 and not self._params.leaves:
            arrays = jax.tree_util.tree_leaves_with_path(rest)
            given = [layout.full(None, len(x.shape)) for _, x in arrays]
            own = with_stages(rest, given, stages)
            paths = [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in arrays]
            self._own = dict(zip(paths, own, strict=True))
        return {name: self._below(name, value, _names(name)) for name, value in rest.items()}

    def _below(self, path: str, value: PyTree, of_optimizer: bool) -> PyTree:
        """Returns the leaves below one node of the state.

        Args:
          path: The path of the node.
          of_optimizer: Whether it belongs to an optimizer.
        """
        if self._params.holds(value):
            return self._copy(path, value)
        if jax.tree_util.all_leaves([value]):
            return self._array(path, value, of_optimizer)
        of_optimizer = of_optimizer or is_optimizer_state(value)
        # One level of the tree: to JAX, all nodes but this one are leaves.
        children, tree = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda x: x is not value
        )
        child_leaves = []
        for keys, child in children:
            key = jax.tree_util.keystr(keys)
            child_leaves.append(self._below(path + key, child, of_optimizer or _names(key)))
        return jax.tree.unflatten(tree, child_leaves)

    def _copy(self, path: str, value: PyTree) -> PyTree:
        arrays, tree = jax.tree.flatten(value)
        copies = [
            dataclasses.replace(leaf, path=leaf.path.replace("params", path, 1), dtype=x.dtype)
            for x, leaf in zip(arrays, self._params.leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, copies)

    def _array(self, path: str, x: Aval, of_optimizer: bool) -> Leaf:
        if reason := self._why_replicated(x, of_optimizer):
            return Leaf.replicated(path, x, reason)
        return Leaf.at_rest(path, x, self._own.get(path), self._mesh, self._config)

    def _why_replicated(self, x: Aval, of_optimizer: bool) -> str:
        stage, small = self._config.stage, self._config.small_array_size
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return "keys are replicated"
        if not self._params.leaves:  # all arrays of the state are here
            return ""
        if x.size <= small:
            return f"extra state of at most {small:,} elements is replicated"
        if stage in (1, 2) and not of_optimizer:
            return f"stage {stage} replicates extra state, stage 3 shards it"
        return ""


def is_optimizer_state(value: PyTree) -> bool:
    """Returns whether a node is the state of an optax transformation."""
    # optax's states have no class in common: they are NamedTuples of its modules.
    return hasattr(value, "_fields") and type(value).__module__.partition(".")[0] == "optax"


def _names(key: str) -> bool:
    """Returns whether a field or a key is named after an optimizer's state."""
    return "opt_state" in key
