"""Planning of a state leaf by leaf: parameters, their optimizer state, the other state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.plan.extra_state import ExtraState, ParameterForm
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.places import choose_places
from zerojax.plan.quantized import QuantizedWeights
from zerojax.plan.state_sharding import DTYPES, Plan
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import PyTree, Shaped


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
      own: the user's spec of each parameter leaf.
      mesh, config: see :class:`Plan`.
      frozen: whether the optimizer leaves a parameter unchanged, one bool a leaf; empty if
        unknown.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(parts.params)
    places = choose_places(config, [math.prod(x.shape) for _, x in paths])
    at_rest = [
        Leaf.at_rest("params" + jax.tree_util.keystr(path), x, spec, mesh, config)
        for (path, x), spec in zip(paths, own, strict=True)
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
            rest=ExtraState(form, mesh, config).leaves(parts.rest),
        ),
        compute=compute,
        quantized=QuantizedWeights(config, compute, frozen_paths, mesh),
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
    # Pairs carry the path of each leaf into the function that optax maps over the tree.
    paths = jax.tree_util.tree_map_with_path(
        lambda path, x: (_shown_path(path), x), parts.opt_state
    )
    params = jax.tree.unflatten(form.tree, map(_with_place, form.leaves, moments))

    def parameter_leaf(pair: PyTree, param: Leaf) -> PyTree:
        if not _is_pair(pair):
            return pair  # optax.masked puts a node without arrays for parameters it skips
        path, x = pair
        if tuple(x.shape) == param.shape:
            return dataclasses.replace(param, path=path, dtype=x.dtype)
        # Factored statistics have a shape of their own.
        return _with_place(Leaf.at_rest(path, x, None, mesh, config), param.place)

    def unowned_leaf(pair: tuple[str, Shaped]) -> Leaf:
        """Plans an array of no known parameter, in the place of most moments."""
        leaf = Leaf.at_rest(*pair, None, mesh, config)
        return _with_place(leaf, max(moments, key=moments.count)) if leaf.shape else leaf

    def is_copy(node: PyTree) -> bool:
        arrays = jax.tree.map(lambda pair: pair[1], node, is_leaf=_is_pair)
        return form.holds(arrays, shapes=False)

    def by_form(node: PyTree) -> PyTree:
        if is_copy(node):
            return jax.tree.map(parameter_leaf, node, params, is_leaf=_is_pair)
        return unowned_leaf(node)

    if tx is None:
        return jax.tree.map(by_form, paths, is_leaf=lambda x: _is_pair(x) or is_copy(x))
    try:
        return optax.tree.map_params(
            tx,
            parameter_leaf,
            paths,
            params,
            transform_non_params=lambda p: Leaf.replicated(p[0], p[1], "belongs to no parameter"),
            is_leaf=lambda x: _is_pair(x) or isinstance(x, optax.MaskedNode),
        )
    except (AttributeError, IndexError, TypeError, ValueError):
        # Some transformations (adafactor, lbfgs) hide from optax which parameter owns a leaf.
        return jax.tree.map(unowned_leaf, paths, is_leaf=_is_pair)


def _with_place(leaf: Leaf, place: str) -> Leaf:
    return dataclasses.replace(leaf, place=place)


def _is_pair(x: object) -> bool:
    return (
        isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str) and not hasattr(x, "_fields")
    )
