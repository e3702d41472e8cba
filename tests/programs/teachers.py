"""Averaged, copied and contrasted networks."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from programs.program import MLP, SGD, Program, copied, creator, refused, vectors


class TaughtState(TrainState):
    """Carries a second set of parameters."""

    teacher: Any


def average(old: Any, new: Any, rate: float = 0.3) -> Any:
    return jax.tree.map(lambda a, p: (1 - rate) * a + rate * p, old, new)


def taught_loss(state: TaughtState, params: Any, batch: Any) -> jax.Array:
    """Regression, and agreement with the teacher on other inputs."""
    apply = state.apply_fn
    taught = apply({"params": state.teacher}, batch["y"])
    consistency = jnp.mean((apply({"params": params}, batch["y"]) - taught) ** 2)
    return jnp.mean((apply({"params": params}, batch["x"]) - batch["y"]) ** 2) + consistency


def mean_teacher_step(state: TaughtState, batch: Any) -> tuple[TaughtState, Any]:
    loss, grads = jax.value_and_grad(lambda p: taught_loss(state, p, batch))(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(teacher=average(state.teacher, state.params)), {"loss": loss}


def bootstrap_loss(state: TaughtState, params: Any, batch: Any) -> jax.Array:
    """Two views of a row, normalized; the target has no gradient."""

    def view(params: Any, x: Any) -> jax.Array:
        z = state.apply_fn({"params": params}, x)
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    target = jax.lax.stop_gradient(view(state.teacher, batch["y"]))
    return jnp.mean(2 - 2 * jnp.sum(view(params, batch["x"]) * target, -1))


def periodic_step(state: TaughtState, batch: Any) -> tuple[TaughtState, Any]:
    """The target is copied every second step."""
    loss, grads = jax.value_and_grad(lambda p: bootstrap_loss(state, p, batch))(state.params)
    new = state.apply_gradients(grads=grads)
    teacher = optax.periodic_update(new.params, state.teacher, new.step, 2)
    return new.replace(teacher=teacher), {"loss": loss}


def contrastive_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Each row against every other."""

    def loss_fn(params: Any) -> jax.Array:
        a, b = (state.apply_fn({"params": params}, batch[name]) for name in "xy")
        logits = a @ b.T
        labels = jnp.arange(len(logits))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


create = creator(MLP(), tx=SGD, kind=TaughtState, teacher=copied)
INTERACT = refused("cannot be accumulated over 4 micro-batches")

PROGRAMS = (
    Program("mean_teacher", create, mean_teacher_step, vectors),
    Program("target_periodic", create, periodic_step, vectors, dtypes=("float64",)),
    Program("contrastive", creator(), contrastive_step, vectors, accumulated=INTERACT),
)
