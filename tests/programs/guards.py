"""Steps that leave out what is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training.train_state import TrainState

from programs.program import ROWS, SGD, Program, creator, squared, vectors


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
    grads = jax.grad(lambda p: squared(state, p, batch))(state.params)
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


guarded = creator(tx=SGD, kind=GuardedState, finite=lambda _: jnp.zeros((), jnp.int32))
scaling = creator(
    tx=SGD, kind=ScaledState,
    dynamic_scale=lambda _: dynamic_scale_lib.DynamicScale(
        growth_interval=2, scale=jnp.asarray(1024.0)
    ),
)  # fmt: skip

PROGRAMS = (
    Program("guard", guarded, guarded_step, sometimes_infinite),
    Program("guard_params", guarded, params_guarded_step, sometimes_infinite),
    Program("guard_cond", guarded, chosen_guard_step, sometimes_infinite),
    Program("dynamic_scale", scaling, dynamic_scale_step, sometimes_infinite),
)  # fmt: skip
