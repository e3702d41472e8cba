"""Workloads: a training step to plan, with abstract state and batch.

task = workload(lambda: linen_model, zero, rows=64, seq=1024)
task.train_step, task.batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from zerojax.api import Zero
from zerojax.models.registry import ModelError
from zerojax.trace.gradients import value_and_grad
from zerojax.xla.types import PyTree

LEARNING_RATE = 1e-4  # of AdamW, if the config names no optimizer; the rate changes no cost

Trained = tuple[Callable[..., PyTree], Callable[..., PyTree]]
"""``create_state`` and ``train_step`` of a :class:`Workload`."""

# Part of the error message for a bare model that is not a language model.
_TAKEN_AS = """\
A bare model is taken as a language model: tokens int32 [B, T] -> logits [B, T, V]. For any other,
pass a function that returns zerojax.Workload(create_state, train_step, batch), such as the one for
images in help(zerojax.Workload)."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step with its state and its batch, to be compiled but not run.

    ``zerojax plan --model`` and :func:`zerojax.fit` take a function that returns a workload. The
    function may have parameters named ``zero``, ``rows``, ``seq``, ``remat`` and ``remat_policy``.

    Attributes:
      create_state: ``create_state(key)`` returns a ``TrainState``, or an ``nnx.Module`` and its
        ``nnx.Optimizer``.
      train_step: The step, undecorated.
      batch: A tree of arrays or ``jax.ShapeDtypeStruct``, with the rows of all devices.
      tokens: The number of tokens in the batch, for tokens per second; 0 if it has no tokens.
      args: Abstract arguments of the step after the batch, such as a dropout key.
      specs: The parameters' ``PartitionSpec`` on other axes of the mesh, as for
        :func:`zerojax.zero`; None if the model annotates its parameters, or has no such specs.
      model: The linen module whose parameters a ``TrainState`` has; only ``zerojax plan
        --generate`` needs it.

    Example: images, in ``my_models.py`` for ``zerojax plan --model my_models:images``

      >>> import zerojax
      >>> class CNN(linen.Module):
      ...     @linen.compact
      ...     def __call__(self, images):  # float32 [B, 32, 32, 3] -> logits [B, 10]
      ...         x = linen.relu(linen.Conv(32, (3, 3), strides=2)(images))
      ...         return linen.Dense(10)(x.mean((1, 2)))
      >>> def images(zero, rows):
      ...     def create_state(key):
      ...         model = CNN()
      ...         params = model.init(key, jnp.zeros((1, 32, 32, 3)))["params"]
      ...         tx = optax.sgd(0.1, momentum=0.9)
      ...         return TrainState.create(apply_fn=model.apply, params=params, tx=tx)
      ...
      ...     def train_step(state, batch):
      ...         def loss_fn(params):
      ...             logits = state.apply_fn({"params": params}, batch["image"])
      ...             return optax.losses.softmax_cross_entropy_with_integer_labels(
      ...                 logits, batch["label"]
      ...             ).mean()
      ...
      ...         loss, grads = jax.value_and_grad(loss_fn)(state.params)
      ...         return state.apply_gradients(grads=grads), {"loss": loss}
      ...
      ...     batch = {
      ...         "image": jax.ShapeDtypeStruct((rows, 32, 32, 3), jnp.float32),
      ...         "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
      ...     }
      ...     return zerojax.Workload(create_state, train_step, batch)

    Example: an encoder-decoder, whose batch has two sequences

      >>> class Translator(linen.Module):
      ...     @linen.compact
      ...     def __call__(self, source, target):  # int32 [B, S] and [B, T] -> logits [B, T, V]
      ...         attention, table = linen.MultiHeadDotProductAttention, linen.Embed(1000, 64)
      ...         memory = table(source)
      ...         memory = memory + attention(4)(memory)
      ...         x = table(target)
      ...         x = x + attention(4)(x, mask=linen.make_causal_mask(target))
      ...         x = x + attention(4)(x, memory)
      ...         return table.attend(x)
      >>> def translation(zero, rows, seq):
      ...     def create_state(key):
      ...         model, tokens = Translator(), jnp.zeros((1, seq), jnp.int32)
      ...         params = model.init(key, tokens, tokens)["params"]
      ...         tx = optax.adamw(1e-3)
      ...         return TrainState.create(apply_fn=model.apply, params=params, tx=tx)
      ...
      ...     def train_step(state, batch):
      ...         source, target = batch["source"], batch["target"]
      ...
      ...         def loss_fn(params):
      ...             logits = state.apply_fn({"params": params}, source, target[:, :-1])
      ...             return optax.losses.softmax_cross_entropy_with_integer_labels(
      ...                 logits, target[:, 1:]
      ...             ).mean()
      ...
      ...         loss, grads = jax.value_and_grad(loss_fn)(state.params)
      ...         return state.apply_gradients(grads=grads), {"loss": loss}
      ...
      ...     batch = {
      ...         "source": jax.ShapeDtypeStruct((rows, seq), jnp.int32),
      ...         "target": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32),
      ...     }
      ...     return zerojax.Workload(create_state, train_step, batch, tokens=rows * seq)

    Both steps can be trained:

      >>> zero = zerojax.zero(stage=3)
      >>> for task in images(zero, rows=8), translation(zero, rows=8, seq=16):
      ...     state = zero.init(task.create_state, jax.random.key(0))
      ...     batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), task.batch)
      ...     state, metrics = zero(task.train_step)(state, batch)
      ...     print(f"{metrics['loss']:.2f}")
      2.30
      5.84
    """

    create_state: Callable[..., PyTree]
    train_step: Callable[..., PyTree]
    batch: PyTree
    tokens: int = 0
    args: tuple[PyTree, ...] = ()
    specs: PyTree = None
    model: linen.Module | None = None


def workload(make: Callable[[], Any], zero: Zero, rows: int, seq: int) -> Workload:
    """Returns the workload that ``make()`` returns, or builds it from a language model.

    A bare model maps tokens int32 [B, T] to logits [B, T, V]. Its step takes ``{"tokens": int32
    [rows, seq + 1]}``, or, if a mesh axis shards the sequence, ``{"tokens": int32 [rows, seq],
    "targets": int32 [rows, seq]}``. The loss is the mean cross-entropy of the next token in
    float32; the optimizer is the config's, or AdamW by default. Nothing is computed.

    Args:
      make: A function that returns a :class:`Workload`, a linen module or an ``nnx.Module``.
      zero: The decorator; its config may name the optimizer.
      rows: Rows of the batch, over all devices.
      seq: Tokens in a row.

    Raises:
      TypeError: ``make()`` returns an object of another type.

    ``create_state`` and ``train_step`` raise :class:`zerojax.models.registry.ModelError` if the
    model does not take tokens, or does not return logits.
    """
    returned: list[Any] = []
    jax.eval_shape(lambda: returned.append(make()))
    model = returned[0]
    if isinstance(model, Workload):
        return model
    if not isinstance(model, linen.Module | nnx.Module):
        raise TypeError(
            f"a {type(model).__name__} is no flax model: return one, or a zerojax.Workload"
        )
    batch = {"tokens": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)}
    if zero.sequence:
        shape = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
        batch = {"tokens": shape, "targets": shape}
    tensor = getattr(model, "tensor", None)  # models of zerojax.models have it
    specs = tensor.specs if tensor else None
    if isinstance(model, nnx.Module):
        return Workload(*_nnx(make, _optimizer(zero)), batch, rows * seq, specs=specs)
    return Workload(*_linen(model, zero, seq), batch, rows * seq, specs=specs, model=model)


def trained(
    zero: Zero, init: Callable[[jax.Array], object], loss: Callable[..., jax.Array]
) -> Trained:
    """Returns ``create_state`` and ``train_step`` of a ``TrainState`` for :class:`Workload`.

    Args:
      zero: The decorator; its config may name the optimizer.
      init: ``init(key)`` returns the parameters.
      loss: ``loss(params, batch, *keys)``; each key of the step is folded with its number.
    """
    tx = _optimizer(zero)

    def create_state(key: jax.Array) -> TrainState:
        return cast(TrainState, TrainState.create(apply_fn=loss, params=init(key), tx=tx))

    def train_step(state: TrainState, batch: PyTree, *keys: jax.Array) -> tuple[TrainState, PyTree]:
        noise = (jax.random.fold_in(key, state.step) for key in keys)
        value, grads = value_and_grad(loss)(state.params, batch, *noise)
        return state.apply_gradients(grads=grads), {"loss": value}

    return create_state, train_step


def _optimizer(zero: Zero) -> optax.GradientTransformation:
    return zero.optimizer() if zero.config.optimizer else optax.adamw(LEARNING_RATE)


def _logits(model: object, call: Callable[[jax.Array], PyTree], tokens: jax.Array) -> PyTree:
    """Returns the logits [B, T, V] that ``call`` computes from tokens [B, T].

    Raises:
      ModelError: The call fails, or does not return logits: the model is not a language model.
    """
    name, inputs = type(model).__name__, f"tokens {tokens.dtype}{list(tokens.shape)}"
    try:
        logits = call(tokens)
    except Exception as error:
        raise ModelError(
            f"{name} fails on {inputs}:\n{type(error).__name__}: {error}\n{_TAKEN_AS}"
        ) from error
    if getattr(logits, "shape", ())[:-1] != tokens.shape:
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", logits)
        raise ModelError(f"{name} gives {shapes} for {inputs}, which are no logits.\n{_TAKEN_AS}")
    return logits


def _loss(model: object, call: Callable[[jax.Array], PyTree], batch: PyTree) -> jax.Array:
    """Returns the mean cross-entropy of the next token, in float32."""
    tokens, targets = batch["tokens"], batch.get("targets")
    if targets is None:
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
    logits = _logits(model, call, tokens).astype(jnp.float32)
    return cast(jax.Array, optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean())


def _linen(model: linen.Module, zero: Zero, seq: int) -> Trained:
    def init(key: jax.Array) -> PyTree:
        variables: dict[str, PyTree] = {}

        def call(tokens: jax.Array) -> PyTree:
            logits, new_variables = model.init_with_output(key, tokens)
            variables.update(new_variables)
            return logits

        _logits(model, call, jnp.zeros((1, seq), jnp.int32))
        if others := set(variables) - {"params"}:
            name = type(model).__name__
            raise ModelError(
                f"{name} has {', '.join(sorted(others))} beside its parameters, which the step of "
                f"a bare model does not update.\n{_TAKEN_AS}"
            )
        return variables["params"]

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return _loss(model, partial(model.apply, {"params": params}), batch)

    return trained(zero, init, loss)


def _nnx(make: Callable[[], nnx.Module], tx: optax.GradientTransformation) -> Trained:
    def create_state(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer[nnx.Module]]:
        model = make()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train_step(
        model: nnx.Module, optimizer: nnx.Optimizer[nnx.Module], batch: object
    ) -> object:
        value, grads = value_and_grad(lambda model: _loss(model, model, batch))(model)
        optimizer.update(model, grads)
        return {"loss": value}

    return create_state, train_step
