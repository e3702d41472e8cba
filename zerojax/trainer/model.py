"""Common interface to linen and NNX models: state, train step, evaluation step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from zerojax.graph.def_use import graph_of
from zerojax.trace.gradients import value_and_grad
from zerojax.trainer.data import Batch
from zerojax.trainer.losses import Forward, forward_of, mean_loss
from zerojax.trainer.partial import Partial, partial_mean
from zerojax.xla import hijax, jaxprs
from zerojax.xla.types import PyTree

R = TypeVar("R")

AnyModel: TypeAlias = nn.Module | nnx.Module | Callable[..., nnx.Module]
"""A model, or a function of ``rngs`` that creates an NNX module."""

Loss = Callable[[Any, PyTree], object]
Create = tuple[Callable[..., PyTree], tuple[PyTree, ...]]


class TracedLoss(NamedTuple):
    """Traced loss function of a batch.

    Attributes:
      forward: The results, with shapes in place of arrays.
      unread: The names of the batch's fields that no operation reads.
    """

    forward: Forward
    unread: list[str]

    @classmethod
    def of(
        cls, function: Callable[..., Forward], args: PyTree, batch: Mapping[str, object]
    ) -> TracedLoss:
        """Traces ``function(args, batch)``."""
        closed, forward = hijax.trace(function, args, batch)
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        graph = graph_of(jaxpr)
        fields = zip(sorted(batch), jaxpr.invars[-len(batch) :], strict=True)
        return cls(forward, [name for name, v in fields if not graph.times_used(v)])


def model_of(model: AnyModel, loss: Loss, seed: int, remat: bool) -> Linen | Nnx:
    """Wraps a linen or NNX model in the common interface.

    Args:
      model: A linen module; an NNX module, or a function ``rngs -> nnx.Module`` that creates it.
      loss: The loss function, see :mod:`zerojax.trainer.losses`.
      seed: The seed of the parameters and of dropout.
      remat: Whether the backward pass recomputes blocks.

    Raises:
      TypeError: The model is none of these.
      ValueError: ``remat`` is set, and the model has no such option.
    """
    if any(c.__module__.partition(".")[0] == "torch" for c in type(model).__mro__):
        raise TypeError(
            f"model: {type(model).__name__} is a PyTorch model: load the folder of its "
            "save_pretrained, loaded = zerojax.models.from_folder(path), and pass "
            "Trainer(loaded.model, params=loaded.parameters, loss=loaded.loss)"
        )
    if nn.Module in getattr(model, "__mro__", ()):
        name = getattr(model, "__name__", "the model")
        raise TypeError(f"model: {name} is a class: pass a module, {name}()")
    if remat:
        model = with_remat(model)
    if isinstance(model, nn.Module):
        return Linen(model, loss, seed)
    if isinstance(model, nnx.Module) or callable(model):
        return Nnx(model, loss, seed)
    raise TypeError(
        f"model: {type(model).__name__} is no flax module, and no function from rngs to an "
        "nnx.Module"
    )


def config_of(model: object) -> Any:
    """Returns the model's config, of any class, or None if it has none."""
    return getattr(model, "config", None)


def hidden_size(model: object) -> int | None:
    """Returns the model's width under one of Hugging Face's names in its config, or None."""
    for name in ("hidden_size", "n_embd", "d_model", "dim"):
        if isinstance(size := getattr(config_of(model), name, None), int):
            return size
    return None


def with_remat(model: object) -> nn.Module:
    """Returns the linen model with ``remat`` turned on, a field of the model or of its config.

    Raises:
      ValueError: The model has no such field.
    """
    config = config_of(model)
    if isinstance(model, nn.Module):
        if hasattr(model, "remat"):
            return model.clone(remat=True)
        if dataclasses.is_dataclass(config) and hasattr(config, "remat"):
            return model.clone(config=dataclasses.replace(config, remat=True))  # type: ignore[type-var]
    raise ValueError(
        "gradient_checkpointing: the model has no field `remat`, nor has its `config`: wrap its "
        "blocks in nn.remat or nnx.remat, and remove the argument"
    )


class LinenState(TrainState):
    """``TrainState`` with the collections other than parameters, such as ``batch_stats``."""

    variables: PyTree


class Linen:
    """A linen module; the loss function receives it bound to the state's parameters."""

    def __init__(self, module: nn.Module, loss: Loss, seed: int) -> None:
        self._module, self._loss, self._seed = module, loss, seed

    def create(self, tx: optax.GradientTransformation, sample: Mapping[str, object]) -> Create:
        """Returns a function that creates the state, and its arguments, for ``zero.init``.

        The function takes the parameters as a further argument in place of new ones.
        """

        def create(key: jax.Array, params: PyTree = None) -> PyTree:
            keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
            batch = jax.tree.map(jnp.asarray, sample)
            others = dict(nn.init(self._loss, self._module)(keys, batch))
            drawn = others.pop("params")
            params = drawn if params is None else params  # XLA removes those that are not used
            return LinenState.create(apply_fn=None, params=params, tx=tx, variables=others)

        return create, (jax.random.key(self._seed),)

    def traced(self, batch: Mapping[str, object]) -> TracedLoss:
        """Traces the loss of a batch, with shapes in place of arrays."""

        def forward(keys: PyTree, batch: PyTree) -> Forward:
            return forward_of(nn.init_with_output(self._loss, self._module)(keys, batch)[0])

        return TracedLoss.of(
            forward, dict.fromkeys(("params", "dropout"), jax.random.key(0)), batch
        )

    def train_step(
        self, state: PyTree, batch: PyTree, key: jax.Array, partial: Partial | None
    ) -> tuple[PyTree, dict[str, jax.Array]]:
        """Makes an update, undecorated; returns the next state and {"loss": ...}.

        For a partial update, ``batch`` is a pair of the batch and a mask of the rows that count.
        """

        def apply_loss(variables: PyTree, batch: PyTree) -> tuple[object, PyTree]:
            others = [name for name in variables if name != "params"]
            apply = nn.apply(self._loss, self._module, mutable=others)
            return apply(variables, batch, rngs={"dropout": key})  # type: ignore[no-any-return]

        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            variables = {"params": params, **state.variables}
            has_state = bool(jax.tree.leaves(state.variables))
            return partial_mean(apply_loss, variables, batch, partial, remembers=has_state)

        (loss, variables), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, variables={**state.variables, **variables})
        return state, {"loss": loss}

    def evaluation(self, function: Callable[[Forward, PyTree], R]) -> Callable[..., R]:
        """Returns a function of the first object of a state and a batch, undecorated:
        function(forward, batch), without dropout."""

        def evaluate(state: PyTree, batch: PyTree) -> R:
            variables = {"params": state.params, **state.variables}
            outputs = nn.apply(self._loss, self._module)(variables, batch)
            return function(forward_of(outputs), batch)

        return evaluate

    def params(self, state: PyTree) -> PyTree:
        """Returns the parameters of a state."""
        return state.params

    def with_params(self, state: PyTree, params: PyTree) -> PyTree:
        """Returns the state with other parameters, a tree as that of :meth:`params`."""
        return state.replace(params=params)


class Nnx:
    """An NNX module, or a function that creates it; its ``Rngs`` supply the keys of dropout.

    The methods are those of :class:`Linen`.
    """

    def __init__(
        self, model: nnx.Module | Callable[..., nnx.Module], loss: Loss, seed: int
    ) -> None:
        self._model, self._loss, self._seed = model, loss, seed

    def create(self, tx: optax.GradientTransformation, sample: Mapping[str, object]) -> Create:
        def with_optimizer(
            model: nnx.Module, params: PyTree = None
        ) -> tuple[nnx.Module, nnx.Optimizer[nnx.Module]]:
            if params is not None:  # XLA removes the parameters that the model has drawn
                nnx.update(model, params)
            model.train()
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        if isinstance(self._model, nnx.Module):
            graph, arrays = nnx.split(self._model)
            return (lambda arrays, *p: with_optimizer(nnx.merge(graph, arrays), *p)), (arrays,)
        return (lambda *p: with_optimizer(self._model(rngs=nnx.Rngs(self._seed)), *p)), ()

    def traced(self, batch: Mapping[str, object]) -> TracedLoss:
        create, arrays = self.create(optax.identity(), batch)
        return TracedLoss.of(
            lambda arrays, batch: forward_of(self._loss(create(*arrays)[0], batch)), arrays, batch
        )

    def train_step(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer[nnx.Module],
        batch: PyTree,
        key: jax.Array,
        partial: Partial | None,
    ) -> tuple[PyTree, dict[str, jax.Array]]:
        def mean(model: nnx.Module) -> jax.Array:
            if partial is None:
                return mean_loss(self._loss(model, batch))
            graph, arrays = nnx.split(model)

            def apply_loss(arrays: PyTree, batch: PyTree) -> tuple[object, PyTree]:
                model = nnx.merge(graph, arrays)
                return self._loss(model, batch), nnx.state(model, nnx.Not(nnx.Param))

            other_state = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
            has_state = bool(jax.tree.leaves(other_state))
            mean, changed = partial_mean(apply_loss, arrays, batch, partial, remembers=has_state)
            nnx.update(model, changed)
            return mean

        loss, grads = value_and_grad(mean)(model)
        optimizer.update(model, grads)
        return (model, optimizer), {"loss": loss}

    def evaluation(self, function: Callable[[Forward, PyTree], R]) -> Callable[..., R]:
        def evaluate(model: nnx.Module, batch: PyTree) -> R:
            model.eval()
            outputs = self._loss(model, batch)
            model.train()
            return function(forward_of(outputs), batch)

        return evaluate

    def params(self, state: PyTree) -> PyTree:
        return nnx.state(state[0], nnx.Param)

    def with_params(self, state: PyTree, params: PyTree) -> PyTree:
        nnx.update(state[0], params)
        return state


Model: TypeAlias = Linen | Nnx
"""The loop's model. A state is a ``TrainState``, or NNX (model, optimizer)."""


def objects(state: PyTree) -> tuple[PyTree, ...]:
    """Returns the first arguments of a step: the state, or the model and the optimizer."""
    return state if isinstance(state, tuple) else (state,)


def check_partial(model: Model, sample: Batch, partial: Partial) -> None:
    """Checks, with the shapes of a sample batch, that a partial update has a loss.

    Raises:
      ValueError: It has none, see :func:`zerojax.trainer.partial.partial_mean`.
    """
    create, arguments = model.create(optax.identity(), sample)
    train_step: Callable[..., PyTree] = model.train_step

    def loss(arguments: tuple[PyTree, ...], key: jax.Array, batch: PyTree) -> PyTree:
        return train_step(*objects(create(*arguments)), batch, key, partial)[1]

    jax.eval_shape(loss, arguments, jax.random.key(0), partial.batch_like(sample))
