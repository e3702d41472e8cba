"""Losses that are no plain mean over rows, and gradients of gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from programs.program import SGD, WIDTH, Program, creator, refused, squared, vectors


def losses(name: str) -> Any:
    """A step whose loss is not a mean over rows alone."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            error = state.apply_fn({"params": params}, batch["x"]) - batch["y"]
            decay = optax.tree.norm(params, squared=True)
            return {
                "sum": lambda: 0.01 * jnp.sum(error**2),
                "root": lambda: jnp.sqrt(jnp.mean(error**2)),
                "masked_regularized": lambda: (
                    jnp.sum(error**2 * batch["mask"][:, None]) / batch["mask"].sum() + 0.1 * decay
                ),
                "maximum": lambda: jnp.max(error**2),
                "two_means": lambda: (
                    jnp.mean(error**2)
                    + jnp.sum(jnp.abs(error) * batch["mask"][:, None]) / batch["mask"].sum()
                ),
                "chunked": lambda: (
                    jax.lax.scan(
                        lambda total, e: (total + jnp.sum(e**2), None),
                        jnp.zeros((), error.dtype),
                        error.reshape(2, -1, WIDTH),
                    )[0]
                    / error.size
                ),
            }[name]()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


def penalty_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """A gradient penalty by row: a gradient inside the loss."""

    def loss_fn(params: Any) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            return state.apply_fn({"params": params}, x).sum()

        slopes = jax.vmap(jax.grad(one))(batch["x"])
        return squared(state, params, batch) + 0.1 * jnp.mean(jnp.sum(slopes**2, -1))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def meta_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """MAML: the loss after an inner step on the same rows."""

    def loss_fn(params: Any) -> jax.Array:
        grads = jax.grad(lambda p: squared(state, p, batch))(params)
        return squared(state, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), batch)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def surgery_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Two gradients, the second without its part along the first."""
    first = jax.grad(lambda p: squared(state, p, batch))(state.params)
    second = jax.grad(lambda p: jnp.mean(jnp.abs(state.apply_fn({"params": p}, batch["y"]))))(
        state.params
    )
    along = optax.tree.vdot(first, second) / optax.tree.vdot(first, first)
    grads = jax.tree.map(lambda a, b: a + b - jnp.minimum(along, 0) * a, first, second)
    return state.apply_gradients(grads=grads), {"along": along}


def backward_step(rule: Any, wrap: Any = lambda f: f) -> Any:
    """A step whose outputs hand their gradients through ``rule``, in a backward function of the
    user's own."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (rule(g),))

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            out = wrap(identity)(state.apply_fn({"params": params}, batch["x"]))
            return jnp.mean((out - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


def clipped_by_row(g: jax.Array) -> jax.Array:
    return g * jnp.minimum(1, 1e-3 / jnp.linalg.norm(g, axis=1, keepdims=True))


def clipped(g: jax.Array) -> jax.Array:
    return g * jnp.minimum(1, 1e-3 / jnp.linalg.norm(g))


INTERACT = refused("cannot be accumulated over 4 micro-batches")

PROGRAMS = (
    *(
        Program(f"loss_{name}", creator(tx=SGD), losses(name), vectors)
        for name in ("sum", "masked_regularized", "two_means")
    ),
    *(
        Program(f"loss_{name}", creator(tx=SGD), losses(name), vectors, accumulated=INTERACT)
        for name in ("root", "maximum", "chunked")
    ),
    Program("gradient_penalty", creator(tx=SGD), penalty_step, vectors),
    Program("meta_learning", creator(tx=SGD), meta_step, vectors, accumulated=INTERACT),
    Program("gradient_surgery", creator(tx=SGD), surgery_step, vectors),
    Program("backward_by_row", creator(tx=SGD), backward_step(clipped_by_row), vectors),
    Program(
        "backward_rematerialized", creator(tx=SGD), backward_step(clipped, jax.checkpoint),
        vectors, accumulated=INTERACT,
    ),
)  # fmt: skip
