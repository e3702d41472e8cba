"""Models of linen and NNX behind one face: state, train step, evaluation step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from zerojax.api import Zero
from zerojax.trace.gradients import value_and_grad
from zerojax.trainer.losses import Forward, forward_of

Loss = Callable[[Any, Any], Any]
Create = tuple[Callable[..., Any], tuple[Any, ...]]


class Model(Protocol):
    """What the loop knows of a model. A state is a ``TrainState``, or (model, optimizer) of NNX."""

    def create(self, tx: optax.GradientTransformation, sample: Any) -> Create:
        """A function that makes the state, and its arguments, for ``zero.init``."""

    def forward(self, batch: Any) -> Forward:
        """What the loss gives of a batch, with shapes in place of arrays."""

    def train_step(self, zero: Zero) -> Any:
        """The step, decorated."""

    def evaluate(self, zero: Zero, function: Callable[[Forward, Any], Any]) -> Any:
        """function(forward, batch) of a state and a batch, without dropout, decorated."""

    def update(self, step: Any, state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        """What a decorated step makes of a state: the next one, and {"loss": ...}."""

    def evaluated(self, function: Any, state: Any, batch: Any) -> Any:
        """What a decorated evaluation gives."""

    def with_params(self, state: Any, source: Any) -> Any:
        """The state with the parameters of a tree, or of a function of abstract ones."""


def model_of(model: Any, loss: Loss, seed: int, remat: bool) -> Model:
    """The face of a model.

    Args:
      model: A linen module; an NNX module, or a function ``rngs -> nnx.Module`` that makes it.
      loss: See :mod:`zerojax.trainer.losses`.
      seed: Of the parameters and of dropout.
      remat: Whether blocks are computed again in the backward pass.

    Raises:
      TypeError: It is none of these.
      ValueError: The model has no ``remat``.
    """
    if remat:
        model = with_remat(model)
    if isinstance(model, nn.Module):
        return Linen(model, loss, seed)
    if isinstance(model, nnx.Module) or callable(model):
        return Nnx(model, loss, seed)
    raise TypeError(
        f"model: {type(model).__name__} is neither a flax.linen nor an nnx module, nor a function "
        "that makes an nnx module of rngs"
    )


def config_of(model: Any) -> Any:
    """The model's config, of whatever class; None without one."""
    return getattr(model, "config", None)


def hidden_size(model: Any) -> int | None:
    """The width that the model's config names as Hugging Face's do; None for no such name."""
    for name in ("hidden_size", "n_embd", "d_model", "dim"):
        if isinstance(size := getattr(config_of(model), name, None), int):
            return size
    return None


def with_remat(model: Any) -> Any:
    """The model with its option ``remat``, of its own or of its config.

    Raises:
      ValueError: It has none.
    """
    config = config_of(model)
    if isinstance(model, nn.Module):
        if hasattr(model, "remat"):
            return model.clone(remat=True)
        if dataclasses.is_dataclass(config) and hasattr(config, "remat"):
            return model.clone(config=dataclasses.replace(config, remat=True))  # type: ignore[type-var]
    raise ValueError(
        "gradient_checkpointing: the model has no field `remat`, nor has its `config`: put "
        "nn.remat or nnx.remat around its blocks, and leave the argument out"
    )


class LinenState(TrainState):
    """With the collections beside the parameters, such as ``batch_stats``."""

    variables: Any


class Linen:
    """A linen module; a loss function gets it bound to the state's parameters."""

    def __init__(self, module: nn.Module, loss: Loss, seed: int) -> None:
        self._module, self._loss, self._seed = module, loss, seed

    def create(self, tx: optax.GradientTransformation, sample: Any) -> Create:
        def create(key: jax.Array) -> LinenState:
            keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
            batch = jax.tree.map(jnp.asarray, sample)
            variables = dict(nn.init(self._loss, self._module)(keys, batch))
            params = variables.pop("params")
            return LinenState.create(apply_fn=None, params=params, tx=tx, variables=variables)

        return create, (jax.random.key(self._seed),)

    def forward(self, batch: Any) -> Forward:
        def forward(keys: Any, batch: Any) -> Any:
            return forward_of(nn.init_with_output(self._loss, self._module)(keys, batch)[0])

        keys = dict.fromkeys(("params", "dropout"), jax.random.key(0))
        return jax.eval_shape(forward, keys, batch)

    def train_step(self, zero: Zero) -> Any:
        @zero
        def train_step(state: Any, batch: Any, key: jax.Array) -> Any:
            apply = nn.apply(self._loss, self._module, mutable=[*state.variables])

            def loss_fn(params: Any) -> Any:
                variables = {"params": params, **state.variables}
                given, changed = apply(variables, batch, rngs={"dropout": key})
                return _mean(given), changed

            (loss, variables), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
            state = state.apply_gradients(grads=grads, variables={**state.variables, **variables})
            return state, {"loss": loss}

        return train_step

    def evaluate(self, zero: Zero, function: Callable[[Forward, Any], Any]) -> Any:
        @zero.evaluate
        def evaluate(state: Any, batch: Any) -> Any:
            variables = {"params": state.params, **state.variables}
            given = nn.apply(self._loss, self._module)(variables, batch)
            return function(forward_of(given), batch)

        return evaluate

    def update(self, step: Any, state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        return step(state, batch, key)

    def evaluated(self, function: Any, state: Any, batch: Any) -> Any:
        return function(state, batch)

    def with_params(self, state: Any, source: Any) -> Any:
        return state.replace(params=as_params(source, state.params))


class Nnx:
    """An NNX module, or a function that makes one; its own ``Rngs`` are the keys of dropout."""

    def __init__(self, model: Any, loss: Loss, seed: int) -> None:
        self._model, self._loss, self._seed = model, loss, seed

    def create(self, tx: optax.GradientTransformation, sample: Any) -> Create:
        def both(model: nnx.Module) -> tuple[nnx.Module, nnx.Optimizer]:
            model.train()
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        if isinstance(self._model, nnx.Module):
            graph, arrays = nnx.split(self._model)
            return (lambda arrays: both(nnx.merge(graph, arrays))), (arrays,)
        return (lambda: both(self._model(rngs=nnx.Rngs(self._seed)))), ()

    def forward(self, batch: Any) -> Forward:
        create, arrays = self.create(optax.identity(), batch)
        return jax.eval_shape(
            lambda arrays, batch: forward_of(self._loss(create(*arrays)[0], batch)), arrays, batch
        )

    def train_step(self, zero: Zero) -> Any:
        @zero
        def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> Any:
            def loss_fn(model: nnx.Module) -> jax.Array:
                return _mean(self._loss(model, batch))

            loss, grads = value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return {"loss": loss}

        return train_step

    def evaluate(self, zero: Zero, function: Callable[[Forward, Any], Any]) -> Any:
        @zero.evaluate
        def evaluate(model: nnx.Module, batch: Any) -> Any:
            model.eval()
            given = self._loss(model, batch)
            model.train()
            return function(forward_of(given), batch)

        return evaluate

    def update(self, step: Any, state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        return state, step(*state, batch)

    def evaluated(self, function: Any, state: Any, batch: Any) -> Any:
        return function(state[0], batch)

    def with_params(self, state: Any, source: Any) -> Any:
        nnx.update(state[0], as_params(source, nnx.state(state[0], nnx.Param)))
        return state


def _mean(given: Any) -> jax.Array:
    mean = forward_of(given).mean
    if mean is None:
        raise ValueError(
            "no loss: the model gave none of this batch, or an array in place of a scalar. Give "
            "the rows `labels`, and let the model's __call__ take them and return {'loss': ...}, "
            "or pass Trainer(loss=zerojax.trainer.causal_lm_loss), classification_loss or your "
            "own: (model, batch) to a scalar, or to (values, weights) of rows or tokens"
        )
    return mean


def placed(params: Any, like: Any, *, own: bool = True) -> Any:
    """Arrays in the places and dtypes of others.

    Args:
      params: The arrays.
      like: The others, a tree of the same form.
      own: Whether the arrays are the caller's, and copied: a step takes its state's memory over.

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
                f"params: {path} is {shapes[0]} where the model has {shapes[1]} (None: there is no "
                "such parameter)"
            )
    leaves = [
        jax.device_put(given[path].astype(x.dtype), x.sharding, may_alias=not own)
        for path, x in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def as_params(source: Any, like: Any) -> Any:
    """The parameters that a run starts from: a tree, or a function of abstract ones to a tree."""
    if not callable(source) or isinstance(source, Mapping):
        return placed(source, like)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    return placed(source(abstract), like, own=False)
