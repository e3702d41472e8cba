"""Planning of a state leaf by leaf: parameters, their optimizer state, the other state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import stage_size
from zerojax.plan import layout
from zerojax.plan.extra_state import AtRest, ExtraState, ParameterForm
from zerojax.plan.layout import Spec
from zerojax.plan.places import Places, choose_places, offloads
from zerojax.plan.quantized import QuantizedWeights
from zerojax.plan.rule import ShardSpec, check_own_spec, shard_spec
from zerojax.plan.state_sharding import DTYPES, Leaf, Plan
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import PyTree, Shaped


def make_plan(
    parts: Parts,
    tx: optax.GradientTransformation | None,
    own: Sequence[PartitionSpec | Spec | None],
    mesh: Mesh,
    axis: str,
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
      mesh, axis, config: see :class:`Plan`.
      frozen: whether the optimizer leaves a parameter unchanged, one bool a leaf; empty if
        unknown.
    """
    at_rest = _rule(mesh, axis, config)
    params, places = _parameters(parts.params, own, at_rest, config)
    param_tree = jax.tree.unflatten(jax.tree.structure(parts.params), params)
    moments = {leaf.path: place.moments for leaf, place in zip(params, places, strict=True)}
    form = ParameterForm(jax.tree.structure(parts.params), tuple(params))
    opt_tree = _optimizer_leaves(parts, tx, form, at_rest, mesh, moments)
    # A state with unknown parameters has all its arrays in ``rest``.
    stage = 3 if config.stage and not params else config.stage
    stages = 1 if params else stage_size(mesh)
    extra = ExtraState(form, at_rest, mesh, stage, config.small_array_size, stages)
    rest_tree = extra.leaves(parts.rest)

    def specs(tree: PyTree, name: str = "spec") -> PyTree:
        return jax.tree.map(lambda leaf: getattr(leaf, name), tree, is_leaf=_is_leaf)

    compute = tuple(
        _computing(leaf, place.compute, config) for leaf, place in zip(params, places, strict=True)
    )
    frozen_paths = {leaf.path for leaf, is_frozen in zip(params, frozen, strict=False) if is_frozen}
    return Plan(
        mesh=mesh,
        axis=axis,
        config=config,
        params=specs(param_tree),
        grads=specs(param_tree, "own_spec" if config.stage < 2 else "spec"),
        opt_state=specs(opt_tree),
        step=PartitionSpec(),
        rest=specs(rest_tree),
        leaves={
            "params": tuple(params),
            "opt_state": tuple(jax.tree.leaves(opt_tree, is_leaf=_is_leaf)),
            "rest": tuple(jax.tree.leaves(rest_tree, is_leaf=_is_leaf)),
        },
        compute=compute,
        quantized=QuantizedWeights(config, compute, frozen_paths, mesh, axis),
    )


def _parameters(
    params: PyTree, own: Sequence[PartitionSpec | Spec | None], at_rest: AtRest, config: ZeroConfig
) -> tuple[list[Leaf], Sequence[Places]]:
    """Plans the parameters: their leaves, and the places of each."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    places = choose_places(config, [math.prod(x.shape) for _, x in paths])
    leaves = [
        dataclasses.replace(
            at_rest("params" + jax.tree_util.keystr(path), x, spec), place=place.master
        )
        for (path, x), spec, place in zip(paths, own, places, strict=True)
    ]
    return leaves, places


def _rule(mesh: Mesh, axis: str, config: ZeroConfig) -> AtRest:
    """Builds the rule that turns a path, an array and the user's spec into a leaf at rest."""
    # Below stage 3 the step gathers parameters once anyway, and moments of any size are sharded.
    smallest = config.stage3_param_persistence_threshold if config.stage == 3 else 0
    allow_parts = not offloads(config)  # offload streams sub-groups as rows on one mesh

    def at_rest(path: str, x: Shaped, own: PartitionSpec | Spec | None) -> Leaf:
        own_spec = layout.full(own, len(x.shape))
        check_own_spec(path, x.shape, own_spec, mesh)
        own_spec = layout.cutting(own_spec, mesh)
        if config.stage == 0:
            chosen = ShardSpec(own_spec, "stage 0 replicates the state")
        else:
            chosen = shard_spec(
                x.shape,
                own_spec,
                mesh,
                axis,
                smallest,
                small=config.small_array_size,
                parts=allow_parts,
                partition=config.zero_hpz_partition_size,
            )
        leaf = Leaf.of(path, x, chosen.spec, own_spec, chosen.reason, mesh)
        return dataclasses.replace(leaf, n_copies=chosen.n_copies)

    return at_rest


def _computing(leaf: Leaf, place: str, config: ZeroConfig) -> Leaf:
    """Converts a parameter at rest into the leaf that the step computes with."""
    low = config.compute_dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    dtype = DTYPES[config.compute_dtype] if low else leaf.dtype
    # Random keys, whose bytes stay as they are, have no numpy dtype.
    itemsize = jnp.dtype(leaf.dtype).itemsize if low else 1
    compute_itemsize = jnp.dtype(dtype).itemsize if low else 1
    return dataclasses.replace(
        leaf,
        dtype=dtype,
        place=place,
        bytes=leaf.bytes // itemsize * compute_itemsize,
        bytes_per_device=leaf.bytes_per_device // itemsize * compute_itemsize,
    )


def _shown_path(path: tuple[object, ...]) -> str:
    """Turns an array's path in a wrapped optimizer's state into its path in the user's state."""
    is_wrapped = jax.tree_util.keystr(path[:1]) == ".inner"
    return f"opt_state{jax.tree_util.keystr(path[1 if is_wrapped else 0 :])}"


def _optimizer_leaves(
    parts: Parts,
    tx: optax.GradientTransformation | None,
    form: ParameterForm,
    at_rest: Any,
    mesh: Mesh,
    moments: Mapping[str, str],
) -> PyTree:
    """Plans the optimizer state; returns its tree with a leaf for each array.

    An array that belongs to a parameter and has its shape is sharded like the parameter. Arrays
    that by optax belong to no parameter are replicated. The rule for parameters shards all others:
    arrays of another shape, and all arrays of an optimizer that hides from optax what they are.
    """
    # Pairs carry the path of each leaf into the function that optax maps over the tree.
    paths = jax.tree_util.tree_map_with_path(
        lambda path, x: (_shown_path(path), x), parts.opt_state
    )

    def parameter_leaf(pair: PyTree, param: Leaf) -> PyTree:
        if not _is_pair(pair):
            return pair  # optax.masked puts a node without arrays for parameters it skips
        path, x = pair
        if tuple(x.shape) == param.shape:
            leaf = Leaf.of(path, x, param.spec, param.own_spec, param.reason, mesh)
            leaf = dataclasses.replace(leaf, n_copies=param.n_copies)
        else:
            leaf = at_rest(path, x, None)  # factored statistics have a shape of their own
        return dataclasses.replace(leaf, place=moments[param.path])

    def place_unowned(leaf: Leaf) -> Leaf:
        """Puts an array of no known parameter into the place of most moments."""
        if not leaf.shape:
            return leaf
        places = list(moments.values())
        return dataclasses.replace(leaf, place=max(places, key=places.count))

    def unowned_leaf(pair: tuple[str, Shaped]) -> Leaf:
        path, x = pair
        return Leaf.of(path, x, (), (), "belongs to no parameter", mesh)

    params = jax.tree.unflatten(form.tree, form.leaves)

    def is_copy(node: PyTree) -> bool:
        arrays = jax.tree.map(lambda pair: pair[1], node, is_leaf=_is_pair)
        return form.holds(arrays, shapes=False)

    def by_form(node: PyTree) -> PyTree:
        if is_copy(node):
            return jax.tree.map(parameter_leaf, node, params, is_leaf=_is_pair)
        return place_unowned(at_rest(*node, None))

    if tx is None:
        return jax.tree.map(by_form, paths, is_leaf=lambda x: _is_pair(x) or is_copy(x))
    try:
        return optax.tree.map_params(
            tx,
            parameter_leaf,
            paths,
            params,
            transform_non_params=unowned_leaf,
            is_leaf=lambda x: _is_pair(x) or isinstance(x, optax.MaskedNode),
        )
    except (AttributeError, IndexError, TypeError, ValueError):
        # Some transformations (adafactor, lbfgs) hide from optax which parameter owns a leaf.
        return jax.tree.map(lambda p: place_unowned(at_rest(*p, None)), paths, is_leaf=_is_pair)


def _is_leaf(x: object) -> bool:
    return isinstance(x, Leaf)


def _is_pair(x: object) -> bool:
    return (
        isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str) and not hasattr(x, "_fields")
    )
