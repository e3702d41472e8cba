"""Target shapes, shardings and dtypes of a flax model's parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from zerojax.plan.stored import unwrap_stored


def abstract(model: nn.Module) -> Any:
    """Returns the `params` of a language model as `jax.ShapeDtypeStruct`."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def wanted(model: nn.Module, like: Any = None, dtype: Any = None) -> Any:
    """Returns the target shape, dtype and sharding of every parameter, in a tree like `like`.

    Args:
      model: The model, with a `config`.
      like: A tree of arrays, of `jax.ShapeDtypeStruct`, or of shardings; None for the model's.
      dtype: The dtype of all parameters; None for the dtype of `like`, or float32.

    Raises:
      ValueError: `like` does not have the model's parameters, or `dtype` is not a float dtype.
    """
    name = f"{type(model).__name__}(config)"
    shapes = abstract(model)
    like = shapes if like is None else like
    expected, given = by_path(shapes), by_path(like)
    if unmatched := expected.keys() ^ given.keys():
        path = min(unmatched)
        owner = name if path in expected else "the tree given"
        raise ValueError(
            f"only {owner} has the parameter {path} ({len(unmatched)} such parameters): give the "
            "config that the model was created with, its n_layer and scan among them"
        )
    leaves = []
    for path, leaf in given.items():
        shape = expected[path].shape
        is_sharding = isinstance(leaf, Sharding)
        if not is_sharding and tuple(leaf.shape) != shape:
            raise ValueError(
                f"the parameter {path} is {list(leaf.shape)} in the tree given, "
                f"{list(shape)} in {name}: give the config that the model was created with"
            )
        leaf_dtype = jnp.dtype(dtype or getattr(leaf, "dtype", jnp.float32))
        if not jnp.issubdtype(leaf_dtype, jnp.floating):
            raise ValueError(f"the parameter {path} shall be {leaf_dtype}: weights are floats")
        sharding = leaf if is_sharding else getattr(unwrap_stored(leaf), "sharding", None)
        leaves.append(jax.ShapeDtypeStruct(shape, leaf_dtype, sharding=sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def by_path(tree: Any) -> dict[str, Any]:
    """Returns a tree's leaves by path, in the format of `weights.load`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def nested(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns a checkpoint's float parameters by path, from shapes by dotted name."""
    return {
        name.replace(".", "/"): jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in shapes.items()
    }


def saved_config(extra: Any, config: type) -> Any:
    """Returns the config, a dataclass of type `config`, from a checkpoint's `extra`.

    Raises:
      ValueError: There is no config, or fields are missing or invalid.
    """
    fields = dataclasses.fields(config)
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    model_fields = fields_of(extra, required, config.__name__)
    given = {f.name: model_fields[f.name] for f in fields if f.name in model_fields}
    return config(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def fields_of(extra: Any, needed: list[str], config: str) -> Mapping[str, Any]:
    """Returns the fields of the config in a checkpoint's `extra`.

    Raises:
      ValueError: `extra` lacks needed fields.
    """
    model_fields = extra.get("model") if isinstance(extra, Mapping) else None
    if not isinstance(model_fields, Mapping) or not model_fields.keys() >= set(needed):
        raise ValueError(
            f"its extra['model'] is {model_fields!r}, but {', '.join(needed)} of the {config} are "
            "needed: save(step, state, extra={'model': {...}})"
        )
    return model_fields
