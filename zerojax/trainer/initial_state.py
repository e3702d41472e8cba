"""State from which a run starts: with new parameters, or with those that the user passes."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from zerojax.api import Zero
from zerojax.optim.frozen import init_reads
from zerojax.trainer.model import Model
from zerojax.xla.types import PyTree


class InitialState:
    """The state before the first update.

    Args:
      model: The model.
      zero: The ``Zero`` of the run.
      tx: The optimizer.
      params: The user's parameters: a tree, or a function of the abstract parameters; None for new
        ones.
    """

    def __init__(
        self,
        model: Model,
        zero: Zero,
        tx: optax.GradientTransformation,
        params: PyTree = None,
    ) -> None:
        self._model, self._zero, self._tx = model, zero, tx
        self._params = params

    def abstract(self, sample: Mapping[str, object]) -> PyTree:
        """Returns the state's shapes and shardings, for models of such a batch."""
        create, arguments = self._model.create(self._tx, sample)
        return self._zero.abstract_state(create, *arguments)

    def create(self, sample: Mapping[str, object]) -> PyTree:
        """Creates the state on the devices; the user's parameters are not drawn first.

        Raises:
          ValueError: The user's parameters are not the model's.
        """
        create, arguments = self._model.create(self._tx, sample)
        if self._params is None:
            return self._zero.init(create, *arguments)
        like = self._zero.abstract_state(create, *arguments)
        params = self._model.params(like)
        if init_reads(self._tx, params):
            on_device = jax.tree.map(_on_device, params)
            return self._zero.init(create, *arguments, as_params(self._params, on_device))

        # Zeros, as memory for both the user's and other parameters may not suffice beside an
        # optimizer's state in memory of the host.
        def create_with_zeros(*arguments: PyTree) -> PyTree:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
            return create(*arguments, zeros)

        state = self._zero.init(create_with_zeros, *arguments)
        given = as_params(self._params, self._model.params(state))
        return self._model.with_params(state, given)


def _on_device(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = x.sharding.with_memory_kind(None)  # type: ignore[union-attr]
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def place_like(params: PyTree, like: PyTree, *, own: bool = True) -> PyTree:
    """Casts and places arrays with the dtypes and shardings of others.

    Args:
      params: The arrays.
      like: Arrays with the target dtypes and shardings, a tree of the same structure.
      own: Whether the arrays belong to the caller. Such arrays are copied, because a step donates
        the buffers of its state.

    Raises:
      ValueError: The trees or shapes differ.
    """
    given, wanted = (
        {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (params, like)
    )
    for path in {*given, *wanted}:
        shapes = [getattr(tree.get(path), "shape", None) for tree in (given, wanted)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"params: {path} is {shapes[0]} where the model has {shapes[1]} (None: missing)"
            )
    leaves = [
        jax.device_put(given[path].astype(x.dtype), x.sharding, may_alias=not own)
        for path, x in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def as_params(source: PyTree, like: PyTree) -> PyTree:
    """Returns placed parameters from a tree, or from a function of the abstract parameters."""
    if not callable(source) or isinstance(source, Mapping):
        return place_like(source, like)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    return place_like(source(abstract), like, own=False)
