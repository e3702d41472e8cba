"""Flax NNX models as decoders with a cache.

Shapes: B rows, T tokens of a call.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.xla.types import PyTree


@dataclasses.dataclass(frozen=True)
class NNXDecoder:
    """A flax NNX decoder whose modules create the cache by `init_cache(input_shape)`.

    It takes `positions`, see `zerojax.models.cache`; or it takes one token at a time, as
    `flax.nnx.MultiHeadAttention` with `decode=True` does. The user's model does not change: `graph`
    is that of a copy for evaluation, with `decode=True` where a module has that field.
    """

    graph: nnx.GraphDef[Any]
    takes_positions: bool
    longest: int | None

    @classmethod
    def of(
        cls, model: nnx.Module, params: PyTree | None, takes_positions: bool, longest: int | None
    ) -> tuple[NNXDecoder, PyTree]:
        """Returns a model as a decoder, and its variables.

        Args:
          model: The model.
          params: Values in place of those of its variables; None for its own.
          takes_positions: Whether its `__call__` takes `positions`.
          longest: The number of tokens of its longest row.

        Raises:
          TypeError: No module has `init_cache`, or `params` are not variables.
          ValueError: `params` are those of another model.
        """
        copy = nnx.merge(*nnx.split(model))
        if not [*_caches(copy)]:
            raise TypeError(
                f"generate: the NNX model {type(model).__name__} keeps no keys and values "
                "between tokens: use flax.nnx.MultiHeadAttention, or a module with a method "
                "`init_cache(input_shape)` that creates nnx.Cache variables and an attribute "
                "`decode`, as in examples/nnx_gpt.py"
            )
        if params is not None:
            _check(copy, params)
            nnx.update(copy, params)
        copy.eval(**({} if takes_positions else {"decode": True}))
        nnx.pop(copy, nnx.Cache)
        graph, variables = nnx.split(copy)
        return cls(graph, takes_positions, longest), nnx.as_pure(variables)

    def limit(self) -> int | None:
        return self.longest

    def __call__(
        self, params: PyTree, cache: PyTree | None, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        model = nnx.merge(self.graph, params)
        for module in _caches(model):
            _create(module, tokens.shape)
        if cache is not None:
            nnx.update(model, cache)
        more: dict[str, Any] = {"positions": positions} if self.takes_positions else {}
        if cache is None and not self.takes_positions:
            tokens = tokens[:, :1]
        logits = model(tokens, **more)
        return logits, nnx.as_pure(nnx.state(model, nnx.Cache))


def _check(model: nnx.Module, params: PyTree) -> None:
    """Rejects variables of another model."""
    remedy = f"pass None, or nnx.state of a {type(model).__name__} of the same config"
    if not isinstance(params, Mapping):
        raise TypeError(f"generate: params: a {type(params).__name__}: {remedy}")
    shapes, found = _shapes(nnx.state(model)), _shapes(params)
    for path in {**_shapes(nnx.state(model, nnx.Param)), **found}:
        if found.get(path) != shapes.get(path):
            have, want = (each.get(path, "not there") for each in (found, shapes))
            raise ValueError(f"generate: params{path} is {have}, and in the model {want}: {remedy}")


def _shapes(variables: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each variable by its path; that of the array for a quantized one."""
    leaves = jax.tree_util.tree_leaves_with_path(
        nnx.as_pure(variables), is_leaf=lambda x: hasattr(x, "shape")
    )
    return {jax.tree_util.keystr(path): tuple(x.shape) for path, x in leaves}


def _caches(model: nnx.Module) -> Iterator[Any]:
    """Yields the modules that create a cache."""
    for _, module in nnx.iter_modules(model):
        if callable(getattr(module, "init_cache", None)):
            yield module


def _create(module: Any, tokens: tuple[int, ...]) -> None:
    """Creates a cache for tokens [B, T] in the dtype of the module's computation."""
    shape = (*tokens, getattr(module, "in_features", 1))
    dtype = getattr(module, "dtype", None)
    arrays = [x for x in jax.tree.leaves(nnx.as_pure(nnx.state(module, nnx.Param)))]
    floating = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if dtype is None and floating:
        dtype = jnp.result_type(*floating)
    takes_dtype = "dtype" in inspect.signature(module.init_cache).parameters
    module.init_cache(shape, **({"dtype": dtype} if takes_dtype and dtype else {}))
