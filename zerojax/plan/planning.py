"""Planning of a state leaf by leaf: parameters, their optimizer state, the other state.

In the state beside the parameters (an average, a frozen base, a second network and its moments) a
copy of the parameters is sharded like them. Other arrays of more than ``small_array_size`` elements
are sharded by the rule for parameters: all of them at stage 3, those of an optimizer at stages 1
and 2. Statistics, counters and PRNG keys are replicated. If zerojax does not know the parameters of
a state, all of its arrays are extra state, and are sharded like parameters, small ones too;
pipeline stages share its stacks of layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import choose_places
from zerojax.plan.quantized import Fp8Products, QuantizedWeights
from zerojax.plan.state_sharding import DTYPES, Plan
from zerojax.train_state.bound import is_optimizer_state
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import Aval, PyTree


def make_plan(
    parts: Parts,
    tx: optax.GradientTransformation | None,
    own: Sequence[PartitionSpec | Spec | None],
    mesh: Mesh,
    config: ZeroConfig,
    frozen: Sequence[bool] = (),
) -> Plan:
    """Plans a state.

    Args:
      parts: abstract or concrete arrays; only shapes and dtypes are read.
      tx: the optimizer of ``parts.opt_state``. optax (``tree.map_params``) maps its leaves to
        parameters, never their shapes. None if only the step knows the optimizer: copies of the
        parameters' tree are then recognized.
      own: the user's spec of each parameter leaf; of each array of ``parts.rest`` if the
        parameters are not known.
      mesh, config: see :class:`Plan`.
      frozen: whether the optimizer leaves a parameter unchanged, one bool a leaf; empty if
        unknown.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(parts.params)
    places = choose_places(config, [math.prod(x.shape) for _, x in paths])
    at_rest = [
        Leaf.at_rest("params" + jax.tree_util.keystr(path), x, spec, mesh, config)
        for (path, x), spec in zip(paths, own, strict=bool(paths))
    ]
    params = [_with_place(leaf, p.master) for leaf, p in zip(at_rest, places, strict=True)]
    compute = tuple(
        dataclasses.replace(leaf, dtype=_compute_dtype(leaf, config), place=place.compute)
        for leaf, place in zip(at_rest, places, strict=True)
    )
    form = ParameterForm(tree, tuple(at_rest))
    moments = [place.moments for place in places]
    frozen_paths = {leaf.path for leaf, is_frozen in zip(params, frozen, strict=False) if is_frozen}
    return Plan(
        mesh=mesh,
        config=config,
        parts=Parts(
            params=jax.tree.unflatten(tree, params),
            opt_state=_optimizer_leaves(parts, tx, form, moments, mesh, config),
            step=Leaf.replicated("step", jax.ShapeDtypeStruct((), jnp.int32), ""),
            rest=ExtraState(form, mesh, config).leaves(parts.rest, own),
        ),
        compute=compute,
        quantized=QuantizedWeights(config, compute, frozen_paths, mesh),
        fp8=Fp8Products(config, compute, mesh),
    )


def _compute_dtype(leaf: Leaf, config: ZeroConfig) -> Any:
    """Returns the dtype in which the step computes with a parameter."""
    low = config.compute_dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.dtype(DTYPES[config.compute_dtype]) if low else leaf.dtype


def _shown_path(path: tuple[object, ...]) -> str:
    """Turns an array's path in a wrapped optimizer's state into its path in the user's state."""
    is_wrapped = jax.tree_util.keystr(path[:1]) == ".inner"
    return f"opt_state{jax.tree_util.keystr(path[1 if is_wrapped else 0 :])}"


def _optimizer_leaves(
    parts: Parts,
    tx: optax.GradientTransformation | None,
    form: ParameterForm,
    moments: Sequence[str],
    mesh: Mesh,
    config: ZeroConfig,
) -> PyTree:
    """Plans the optimizer state; returns its tree with a leaf for each array.

    An array that belongs to a parameter and has its shape is sharded like the parameter, in the
    place of ``moments``. Arrays that by optax belong to no parameter are replicated. The rule for
    parameters shards all others: arrays of another shape, and all arrays of an optimizer that hides
    from optax what they are.
    """
    params = jax.tree.unflatten(form.tree, map(_with_place, form.leaves, moments))
    # In place of the arrays, as optax maps no path: a leaf has the path of its array.
    arrays = jax.tree_util.tree_map_with_path(
        lambda path, x: Leaf.replicated(_shown_path(path), x, "belongs to no parameter"),
        parts.opt_state,
    )

    def owned(leaf: PyTree, param: Leaf) -> PyTree:
        if not isinstance(leaf, Leaf):
            return leaf  # optax.masked puts a node without arrays for parameters it skips
        if leaf.shape == param.shape:
            return dataclasses.replace(param, path=leaf.path, dtype=leaf.dtype)
        # Factored statistics have a shape of their own.
        return _with_place(Leaf.at_rest(leaf.path, leaf, None, mesh, config), param.place)

    def unowned(leaf: Leaf) -> Leaf:
        """Plans an array of no known parameter, in the place of most moments."""
        leaf = Leaf.at_rest(leaf.path, leaf, None, mesh, config)
        return _with_place(leaf, max(moments, key=moments.count)) if leaf.shape else leaf

    def is_copy(node: PyTree) -> bool:
        return form.holds(node, shapes=False)

    def by_form(node: PyTree) -> PyTree:
        return jax.tree.map(owned, node, params) if is_copy(node) else unowned(node)

    if tx is None:
        return jax.tree.map(by_form, arrays, is_leaf=is_copy)
    try:
        return optax.tree.map_params(
            tx, owned, arrays, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
        )
    except (AttributeError, IndexError, TypeError, ValueError):
        # Some transformations (adafactor, lbfgs) hide from optax which parameter owns a leaf.
        return jax.tree.map(unowned, arrays)


def _with_place(leaf: Leaf, place: str) -> Leaf:
    return dataclasses.replace(leaf, place=place)


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
        self._own: dict[str, PartitionSpec | Spec | None] = {}

    def leaves(
        self, rest: Mapping[str, PyTree], own: Sequence[PartitionSpec | Spec | None]
    ) -> dict[str, PyTree]:
        """Returns the leaf of each array, in the form of ``rest``.

        Args:
          rest: The arrays.
          own: The user's spec of each, read if the parameters are not known; empty for none.
        """
        if not self._params.leaves:
            arrays = jax.tree_util.tree_leaves_with_path(rest)
            paths = [f"{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in arrays]
            self._own = dict(zip(paths, own, strict=bool(own)))
        return {name: self._below(name, value, False) for name, value in rest.items()}

    def _below(self, path: str, value: PyTree, of_optimizer: bool) -> PyTree:
        """Returns the leaves below one node of the state.

        Args:
          path: The path of the node.
          of_optimizer: Whether it belongs to an optimizer.
        """
        holds = self._params.holds

        def enters(node: PyTree) -> bool:
            return not of_optimizer and is_optimizer_state(node)

        def plan(keys: tuple[object, ...], node: PyTree) -> PyTree:
            at = path + jax.tree_util.keystr(keys)
            if holds(node):
                return self._copy(at, node)
            if enters(node):
                return self._below(at, node, True)
            return self._array(at, node, of_optimizer or "opt_state" in at)

        return jax.tree_util.tree_map_with_path(
            plan, value, is_leaf=lambda node: holds(node) or enters(node)
        )

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
