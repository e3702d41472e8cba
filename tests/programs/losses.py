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
                "regularized": lambda: jnp.mean(error**2) + 0.1 * decay,
                "sum_regularized": lambda: 0.01 * jnp.sum(error**2) + 0.1 * decay,
                "root": lambda: jnp.sqrt(jnp.mean(error**2)),
                "masked_regularized": lambda: (
                    jnp.sum(error**2 * batch["mask"][:, None]) / batch["mask"].sum() + 0.1 * decay
                ),
                "maximum": lambda: jnp.max(error**2),
                "logarithm": lambda: jax.nn.logsumexp(jnp.sum(error**2, -1)),
                "by_rows": lambda: jnp.sum(error**2) / len(error),
                "two_means": lambda: (
                    jnp.mean(error**2)
                    + jnp.sum(jnp.abs(error) * batch["mask"][:, None]) / batch["mask"].sum()
                ),
                "product": lambda: jnp.mean(error**2) * jnp.mean(jnp.abs(error)),
                "vmapped": lambda: (
                    jax.vmap(lambda e, m: m * jnp.sum(e**2))(error, batch["mask"]).sum()
                    / batch["mask"].sum()
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


def sharpness_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """SAM: the gradient at the worst point nearby, which a gradient leads to."""
    grad_fn = jax.value_and_grad(lambda p: squared(state, p, batch))
    loss, grads = grad_fn(state.params)
    norm = optax.tree.norm(grads)
    there = jax.tree.map(lambda p, g: p + 0.1 * g / norm, state.params, grads)
    _, grads = grad_fn(there)
    return state.apply_gradients(grads=grads), {"loss": loss}


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


def two_losses_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Two gradients of the same parameters, added."""
    one, first = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
    two, second = jax.value_and_grad(
        lambda p: jnp.sum(state.apply_fn({"params": p}, batch["y"]) ** 2) / batch["mask"].sum()
    )(state.params)
    grads = jax.tree.map(lambda a, b: a + 0.01 * b, first, second)
    return state.apply_gradients(grads=grads), {"one": one, "two": two}


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


class RunningState(TrainState):
    """Carries the running mean of its losses."""

    running: Any


def hard_examples(by: str) -> Any:
    """A step that learns from rows whose loss is above the mean: that of the batch, or the running
    one, which it carries, before or after this batch."""

    def step(state: RunningState, batch: Any) -> tuple[RunningState, Any]:
        def loss_fn(params: Any) -> Any:
            made = state.apply_fn({"params": params}, batch["x"])
            losses = jnp.mean((made - batch["y"]) ** 2, -1)
            mean = jax.lax.stop_gradient(losses.mean())
            after = 0.9 * state.running + 0.1 * mean
            limit = {"batch": mean, "before": state.running, "after": after}[by]
            hard = losses > limit
            return jnp.sum(losses * hard) / jnp.maximum(hard.sum(), 1), after

        (loss, after), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        running = state.running if by == "batch" else after
        return state.apply_gradients(grads=grads, running=running), {"loss": loss}

    return step


INTERACT = refused("cannot be accumulated over 4 micro-batches")
running = creator(tx=SGD, kind=RunningState, running=lambda _: jnp.ones(()))

PROGRAMS = (
    *(
        Program(f"loss_{name}", creator(tx=SGD), losses(name), vectors)
        for name in (
            "sum", "regularized", "sum_regularized", "masked_regularized", "by_rows",
            "two_means", "vmapped",
        )
    ),
    *(
        Program(f"loss_{name}", creator(tx=SGD), losses(name), vectors, accumulated=INTERACT)
        for name in ("root", "maximum", "logarithm", "product", "chunked")
    ),
    Program("sharpness", creator(tx=SGD), sharpness_step, vectors, accumulated=INTERACT),
    Program("gradient_penalty", creator(tx=SGD), penalty_step, vectors),
    Program("meta_learning", creator(tx=SGD), meta_step, vectors, accumulated=INTERACT),
    Program("two_losses", creator(tx=SGD), two_losses_step, vectors),
    Program("gradient_surgery", creator(tx=SGD), surgery_step, vectors),
    Program("backward_by_row", creator(tx=SGD), backward_step(clipped_by_row), vectors),
    Program(
        "backward_of_all_rows", creator(tx=SGD), backward_step(clipped), vectors,
        accumulated=INTERACT,
    ),
    Program(
        "backward_rematerialized", creator(tx=SGD), backward_step(clipped, jax.checkpoint),
        vectors, accumulated=INTERACT,
    ),
    *(
        Program(
            f"hard_examples_by_{by}", running, hard_examples(by), vectors, dtypes=("float64",),
            accumulated=INTERACT,
        )
        for by in ("batch", "before", "after")
    ),
)  # fmt: skip
