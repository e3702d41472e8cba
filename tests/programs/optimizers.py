"""What follows from the gradients: guards, scales, norms, and optax's wrappers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from programs.guards import sometimes_infinite
from programs.program import (
    ADAM,
    ROW,
    SGD,
    WIDTH,
    Program,
    creator,
    regression_step,
    squared,
    vectors,
)


def changing(change: Any) -> Any:
    """A step with ``change(grads, loss, params)`` between gradients and update."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        loss, grads = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
        norm = optax.tree.norm(grads)
        grads = change(grads, loss, state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "norm": norm}

    return step


def normalized_by_leaf(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: g / (jnp.linalg.norm(g) + 1e-8), grads)


def clipped_by_value(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: jnp.clip(g, -0.05, 0.05), grads)


def label_adapters(params: Any) -> Any:
    return {k: "adapter" if k.startswith("adapter") else "frozen" for k in params}


class Adapted(nn.Module):
    """A dense layer with a low-rank adapter."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        down = nn.Dense(2, use_bias=False, name="adapter_down")(x)
        return nn.Dense(WIDTH, name="base")(x) + nn.Dense(WIDTH, name="adapter_up")(down)


LORA = optax.multi_transform({"adapter": ADAM, "frozen": optax.set_to_zero()}, label_adapters)


def plateau_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """The optimizer is told the loss."""
    loss, grads = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=loss)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}


def weights_clipped_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Parameters are clipped after the update."""
    state, metrics = regression_step(state, batch)
    params = jax.tree.map(lambda p: jnp.clip(p, -0.3, 0.3), state.params)
    return state.replace(params=params), metrics


class NNXRegression(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def nnx_create(key: jax.Array) -> Any:
    model = NNXRegression(nnx.Rngs(key))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def nnx_clipped_step(model: Any, optimizer: Any, batch: Any) -> Any:
    loss, grads = nnx.value_and_grad(
        lambda model: (
            jnp.sum((model(batch["x"]) - batch["y"]) ** 2 * batch["mask"][:, None])
            / batch["mask"].sum()
        )
    )(model)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.2 / norm), grads)
    optimizer.update(model, grads)
    return {"loss": loss, "norm": norm, "step": optimizer.step[...]}


INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(1e-2, 4))
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5))

PROGRAMS = (
    *(
        Program(f"gradients_{change.__name__}", creator(tx=SGD), changing(change), vectors)
        for change in (normalized_by_leaf, clipped_by_value)
    ),
    Program("lora_optimizer", creator(Adapted(), ROW, LORA), regression_step, vectors),
    Program("plateau", creator(tx=PLATEAU), plateau_step, vectors),
    Program("weights_clipped", creator(tx=SGD), weights_clipped_step, vectors),
    Program(
        "multi_steps", creator(tx=optax.MultiSteps(SGD, 2).gradient_transformation()),
        regression_step, vectors, dtypes=("float32", "bfloat16"),
    ),
    Program(
        "apply_if_finite", creator(tx=optax.apply_if_finite(SGD, 5)), regression_step,
        sometimes_infinite,
    ),
    Program("inject_hyperparams", creator(tx=INJECTED), regression_step, vectors),
    Program("nnx_clipped", nnx_create, nnx_clipped_step, vectors, nnx=True),
)  # fmt: skip
