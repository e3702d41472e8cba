"""What is to be planned: a step with the state and the batch it takes, all abstract.

made = workload(lambda: linen_model, zero, rows=64, seq=1024)
made.train_step, made.batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from zerojax.api import Zero
from zerojax.trace.gradients import value_and_grad

LEARNING_RATE = 1e-4  # of AdamW, where the config names no optimizer; it costs nothing else


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training step, to be compiled and not run.

    Attributes:
      create_state: ``create_state(key)`` returns a ``TrainState``, or an ``nnx.Module`` and its
        ``nnx.Optimizer``.
      train_step: as ``zero`` decorates it.
      batch: of all devices, arrays or ``jax.ShapeDtypeStruct``.
      tokens: in a batch; 0 where it has none.
      args: what the step takes behind the batch, abstract too: a dropout key, perhaps.
    """

    create_state: Callable[..., Any]
    train_step: Callable[..., Any]
    batch: Any
    tokens: int = 0
    args: tuple[Any, ...] = ()


def workload(make: Callable[[], Any], zero: Zero, rows: int, seq: int) -> Workload:
    """What ``make()`` gives, or the workload of the flax model it gives, to predict the next token.

    A model maps tokens int [B, T] to logits [B, T, V]. Its step takes ``{"tokens": int32
    [rows, seq + 1]}``; the loss is the mean cross-entropy in float32, the optimizer the config's,
    else AdamW. Nothing is computed.

    Args:
      make: returns a :class:`Workload`, a linen module or an ``nnx.Module``.
      zero: for its config's optimizer.
      rows, seq: of the batch of all devices.

    Raises:
      TypeError: it returns none of these.
    """
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(make()))
    made = found[0]
    if isinstance(made, Workload):
        return made
    if not isinstance(made, linen.Module | nnx.Module):
        raise TypeError(
            f"a {type(made).__name__} is no flax model: return a linen module, an nnx.Module, or "
            "a zerojax.Workload(create_state, train_step, batch)"
        )
    tx = zero.optimizer() if zero.config.optimizer else optax.adamw(LEARNING_RATE)
    batch = {"tokens": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)}
    parts = _linen(made, tx, seq) if isinstance(made, linen.Module) else _nnx(make, tx)
    return Workload(*parts, batch, rows * seq)


def _loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def _linen(
    model: linen.Module, tx: optax.GradientTransformation, seq: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def create_state(key: jax.Array) -> TrainState:
        variables = model.init(key, jnp.zeros((1, seq), jnp.int32))
        if more := set(variables) - {"params"}:
            raise TypeError(
                f"{type(model).__name__} has {', '.join(sorted(more))} beside its parameters: "
                "give a zerojax.Workload with the step that carries them"
            )
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        tokens = batch["tokens"]

        def loss(params: Any) -> jax.Array:
            return _loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens)

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return create_state, train_step


def _nnx(
    make: Callable[[], nnx.Module], tx: optax.GradientTransformation
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def create_state(key: jax.Array) -> Any:
        model = make()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        tokens = batch["tokens"]

        def loss(model: Any) -> jax.Array:
            return _loss(model(tokens[:, :-1]), tokens)

        value, grads = value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return {"loss": value}

    return create_state, train_step
