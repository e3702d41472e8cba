"""Steps that leave out what is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training.train_state import TrainState

from programs.program import ROWS, SGD, Program, creator, squared, vectors


class GuardedState(TrainState):
    """Counts the steps that were finite."""

    finite: Any


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
    Program("guard_cond", guarded, chosen_guard_step, sometimes_infinite),
    Program("dynamic_scale", scaling, dynamic_scale_step, sometimes_infinite),
)  # fmt: skip
