"""What follows from the gradients: guards, scales, norms, and optax's wrappers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training.train_state import TrainState

from programs.program import (
    ADAM,
    ROW,
    ROWS,
    SGD,
    WIDTH,
    Program,
    creator,
    refused,
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


def normalized(grads: Any, loss: Any, params: Any) -> Any:
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g / norm, grads)


def normalized_by_leaf(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: g / (jnp.linalg.norm(g) + 1e-8), grads)


def clipped(grads: Any, loss: Any, params: Any) -> Any:
    return optax.clip_by_global_norm(0.2).update(grads, optax.EmptyState())[0]


def clipped_by_value(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: jnp.clip(g, -0.05, 0.05), grads)


def scaled(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: g * loss, grads)


def decayed(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(lambda g, p: g + 0.1 * p, grads, params)


def signed(grads: Any, loss: Any, params: Any) -> Any:
    return jax.tree.map(jnp.sign, grads)


def chosen(grads: Any, loss: Any, params: Any) -> Any:
    return jax.lax.cond(
        loss > 1.2, lambda g: jax.tree.map(lambda x: 0.5 * x, g), lambda g: g, grads
    )


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
                "masked_regularized": lambda: jnp.sum(error**2 * batch["mask"][:, None])
                / batch["mask"].sum()
                + 0.1 * decay,
                "maximum": lambda: jnp.max(error**2),
                "logarithm": lambda: jax.nn.logsumexp(jnp.sum(error**2, -1)),
                "by_rows": lambda: jnp.sum(error**2) / len(error),
                "two_means": lambda: jnp.mean(error**2)
                + jnp.sum(jnp.abs(error) * batch["mask"][:, None]) / batch["mask"].sum(),
                "product": lambda: jnp.mean(error**2) * jnp.mean(jnp.abs(error)),
                "vmapped": lambda: jax.vmap(lambda e, m: m * jnp.sum(e**2))(
                    error, batch["mask"]
                ).sum()
                / batch["mask"].sum(),
                "chunked": lambda: jax.lax.scan(
                    lambda total, e: (total + jnp.sum(e**2), None),
                    jnp.zeros((), error.dtype),
                    error.reshape(2, -1, WIDTH),
                )[0]
                / error.size,
            }[name]()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


class GuardedState(TrainState):
    """Counts the steps that were finite."""

    finite: Any


def guarded_step(state: GuardedState, batch: Any) -> tuple[GuardedState, Any]:
    """A step whose loss is not finite leaves the state as it was."""
    loss, grads = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
    finite = jnp.isfinite(loss)
    new = state.apply_gradients(grads=grads)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    new = new.replace(finite=state.finite + finite)
    return new, {"loss": jnp.where(finite, loss, 0), "finite": finite}


def params_guarded_step(state: GuardedState, batch: Any) -> tuple[GuardedState, Any]:
    """The same for parameters and moments alone, on the gradients' norm."""
    loss, grads = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
    finite = jnp.isfinite(optax.tree.norm(grads))
    new = state.apply_gradients(grads=grads)

    def keep(a: Any, b: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)

    new = new.replace(
        params=keep(new.params, state.params),
        opt_state=keep(new.opt_state, state.opt_state),
        finite=state.finite + finite,
    )
    return new, {"finite": finite}


def chosen_guard_step(state: GuardedState, batch: Any) -> tuple[GuardedState, Any]:
    """By ``lax.cond`` around the update."""
    loss, grads = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
    finite = jnp.isfinite(loss)
    new = jax.lax.cond(
        finite, lambda s, g: s.apply_gradients(grads=g), lambda s, g: s, state, grads
    )
    return new.replace(finite=new.finite + finite), {"finite": finite}


def sometimes_infinite(rng: np.random.Generator) -> tuple[Any, ...]:
    """One batch of the three holds an infinity, in its second micro-batch."""
    (batch,) = vectors(rng)
    if rng.random() < 0.5:
        batch["y"][ROWS // 4, 0] = np.inf
    return (batch,)


class ScaledState(TrainState):
    """As in flax's examples."""

    dynamic_scale: Any


def dynamic_scale_step(state: ScaledState, batch: Any) -> tuple[ScaledState, Any]:
    """flax's own mixed precision."""
    grad_fn = state.dynamic_scale.value_and_grad(lambda p: squared(state, p, batch))
    scale, finite, loss, grads = grad_fn(state.params)
    new = state.apply_gradients(grads=grads)

    def keep(a: Any, b: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)

    new = new.replace(
        opt_state=keep(new.opt_state, state.opt_state),
        params=keep(new.params, state.params),
        dynamic_scale=scale,
    )
    return new, {"loss": jnp.where(finite, loss, 0), "scale": scale.scale}


def label_adapters(params: Any) -> Any:
    return {k: "adapter" if k.startswith("adapter") else "frozen" for k in params}


class Adapted(nn.Module):
    """A dense layer with a low-rank adapter."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        down = nn.Dense(2, use_bias=False, name="adapter_down")(x)
        return nn.Dense(WIDTH, name="base")(x) + nn.Dense(WIDTH, name="adapter_up")(down)


LORA = optax.multi_transform({"adapter": ADAM, "frozen": optax.set_to_zero()}, label_adapters)


def adapters_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Gradients of the adapters alone; zeros elsewhere."""
    base = {k: v for k, v in state.params.items() if not k.startswith("adapter")}

    def loss_fn(adapters: Any) -> jax.Array:
        return squared(state, base | adapters, batch)

    adapters = {k: v for k, v in state.params.items() if k.startswith("adapter")}
    loss, grads = jax.value_and_grad(loss_fn)(adapters)
    grads = jax.tree.map(jnp.zeros_like, base) | grads
    return state.apply_gradients(grads=grads), {"loss": loss}


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
        return squared(
            state, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), batch
        )

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


def update_norm_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Results made of the update, the state before and after, and the optimizer's state."""
    new, metrics = regression_step(state, batch)
    moved = jax.tree.map(jnp.subtract, new.params, state.params)
    return new, metrics | {"moved": optax.tree.norm(moved), "step": new.step}


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
        lambda model: jnp.sum((model(batch["x"]) - batch["y"]) ** 2 * batch["mask"][:, None])
        / batch["mask"].sum()
    )(model)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.2 / norm), grads)
    optimizer.update(model, grads)
    return {"loss": loss, "norm": norm, "step": optimizer.step[...]}


INTERACT = refused("cannot be accumulated over 4 micro-batches")
guarded = creator(tx=SGD, kind=GuardedState, finite=lambda _: jnp.zeros((), jnp.int32))
running = creator(tx=SGD, kind=RunningState, running=lambda _: jnp.ones(()))
scaling = creator(
    tx=SGD, kind=ScaledState,
    dynamic_scale=lambda _: dynamic_scale_lib.DynamicScale(
        growth_interval=2, scale=jnp.asarray(1024.0)
    ),
)  # fmt: skip
INJECTED = optax.inject_hyperparams(optax.adam)(
    learning_rate=optax.cosine_decay_schedule(1e-2, 4)
)
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5))

PROGRAMS = (
    *(
        Program(f"gradients_{change.__name__}", creator(tx=SGD), changing(change), vectors)
        for change in (
            normalized, normalized_by_leaf, clipped, clipped_by_value, scaled, decayed, chosen,
        )
    ),
    Program("gradients_signed", creator(tx=optax.sgd(0.01)), changing(signed), vectors, dtypes=("float64",)),
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
    Program("guard", guarded, guarded_step, sometimes_infinite),
    Program("guard_params", guarded, params_guarded_step, sometimes_infinite),
    Program("guard_cond", guarded, chosen_guard_step, sometimes_infinite),
    Program("dynamic_scale", scaling, dynamic_scale_step, sometimes_infinite),
    Program("lora_optimizer", creator(Adapted(), ROW, LORA), regression_step, vectors),
    Program("lora_gradients", creator(Adapted(), ROW, LORA), adapters_step, vectors),
    Program("sharpness", creator(tx=SGD), sharpness_step, vectors, accumulated=INTERACT),
    Program("gradient_penalty", creator(tx=SGD), penalty_step, vectors),
    Program("meta_learning", creator(tx=SGD), meta_step, vectors, accumulated=INTERACT),
    Program("two_losses", creator(tx=SGD), two_losses_step, vectors),
    Program("gradient_surgery", creator(tx=SGD), surgery_step, vectors),
    *(
        Program(
            f"hard_examples_by_{by}", running, hard_examples(by), vectors, dtypes=("float64",),
            accumulated=INTERACT,
        )
        for by in ("batch", "before", "after")
    ),
    Program("plateau", creator(tx=PLATEAU), plateau_step, vectors),
    Program("weights_clipped", creator(tx=SGD), weights_clipped_step, vectors),
    Program("update_norm", creator(), update_norm_step, vectors),
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
