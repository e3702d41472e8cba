"""Generative models: noise from a key, from the batch, two networks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from programs.program import (
    ADAM,
    MLP,
    ROW,
    ROWS,
    WIDTH,
    Program,
    creator,
    keyed,
    refused,
    told,
    vectors,
)


class VAE(nn.Module):
    """A variational autoencoder, [B, 8] -> reconstruction, mean and log variance."""

    @nn.compact
    def __call__(self, x: jax.Array, noise: jax.Array) -> Any:
        mean, log_variance = jnp.split(nn.Dense(2 * WIDTH)(x), 2, -1)
        z = mean + noise * jnp.exp(0.5 * log_variance)
        return nn.Dense(WIDTH)(nn.tanh(z)), mean, log_variance


def elbo(outputs: Any, x: jax.Array) -> jax.Array:
    made, mean, log_variance = outputs
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
    return jnp.mean(jnp.sum((made - x) ** 2, -1)) + jnp.mean(divergence)


class KeyedState(TrainState):
    """Carries its key."""

    key: jax.Array


def argument_step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, Any]:
    noise = jax.random.normal(key, batch["x"].shape)

    def loss_fn(params: Any) -> jax.Array:
        return elbo(state.apply_fn({"params": params}, batch["x"], noise), batch["x"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def state_step(state: KeyedState, batch: Any) -> tuple[KeyedState, Any]:
    key, noise = jax.random.split(state.key)
    state, metrics = argument_step(state, batch, noise)
    return state.replace(key=key), metrics


def create_vae(start: jax.Array, kind: Any = TrainState, **fields: Any) -> TrainState:
    model = VAE()
    params = model.init(start, ROW, ROW)["params"]
    return kind.create(apply_fn=model.apply, params=params, tx=ADAM, **fields)


def real_and_noise(rng: np.random.Generator) -> tuple[Any, ...]:
    """Real rows, and the noise that the generator starts from."""
    return ({"real": rng.normal(1, size=(ROWS, WIDTH)), "z": rng.normal(size=(ROWS, WIDTH))},)


GENERATOR, CRITIC = MLP(), MLP(1)


class AdversarialState(TrainState):
    """A generator that carries its critic, which is a state of its own."""

    critic: TrainState


def create_adversarial(key: jax.Array) -> AdversarialState:
    one, two = jax.random.split(key)
    critic = creator(CRITIC)(two)
    params = GENERATOR.init(one, ROW)["params"]
    return AdversarialState.create(apply_fn=GENERATOR.apply, params=params, tx=ADAM, critic=critic)


def critic_loss(params: Any, real: jax.Array, fake: jax.Array) -> jax.Array:
    judge = lambda x: CRITIC.apply({"params": params}, x)  # noqa: E731
    return jnp.mean(nn.softplus(-judge(real))) + jnp.mean(nn.softplus(judge(fake)))


def generator_loss(params: Any, critic: Any, z: jax.Array) -> jax.Array:
    fake = GENERATOR.apply({"params": params}, z)
    return jnp.mean(nn.softplus(-CRITIC.apply({"params": critic}, fake)))


def simultaneous_step(state: AdversarialState, batch: Any) -> tuple[AdversarialState, Any]:
    """Both networks learn from each other as they were."""
    fake = GENERATOR.apply({"params": state.params}, batch["z"])
    critic_value, critic_grads = jax.value_and_grad(critic_loss)(
        state.critic.params, batch["real"], fake
    )
    value, grads = jax.value_and_grad(generator_loss)(state.params, state.critic.params, batch["z"])
    critic = state.critic.apply_gradients(grads=critic_grads)
    state = state.apply_gradients(grads=grads, critic=critic)
    return state, {"generator": value, "critic": critic_value}


def alternating_step(state: AdversarialState, batch: Any) -> tuple[AdversarialState, Any]:
    """The generator learns from the critic after its update."""
    fake = GENERATOR.apply({"params": state.params}, batch["z"])
    critic_value, critic_grads = jax.value_and_grad(critic_loss)(
        state.critic.params, batch["real"], fake
    )
    critic = state.critic.apply_gradients(grads=critic_grads)
    value, grads = jax.value_and_grad(generator_loss)(state.params, critic.params, batch["z"])
    state = state.apply_gradients(grads=grads, critic=critic)
    return state, {"generator": value, "critic": critic_value}


def two_states_step(generator: TrainState, critic: TrainState, batch: Any) -> Any:
    """The usual form: two arguments, two updates."""
    fake = GENERATOR.apply({"params": generator.params}, batch["z"])
    critic_value, critic_grads = jax.value_and_grad(critic_loss)(critic.params, batch["real"], fake)
    value, grads = jax.value_and_grad(generator_loss)(generator.params, critic.params, batch["z"])
    new = critic.apply_gradients(grads=critic_grads)
    return generator.apply_gradients(grads=grads), new, {"generator": value, "critic": critic_value}


def create_two_states(key: jax.Array) -> Any:
    one, two = jax.random.split(key)
    return creator(GENERATOR)(one), creator(CRITIC)(two)


def call_two_states(step: Any, states: Any, arguments: Any) -> Any:
    *states, metrics = step(*states, *arguments)
    return tuple(states), metrics


class NNXVAE(nnx.Module):
    """The VAE in NNX; the noise is drawn from a stream that is passed."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.decoder = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> Any:
        mean, log_variance = jnp.split(self.encoder(x), 2, -1)
        z = mean + jax.random.normal(key, mean.shape) * jnp.exp(0.5 * log_variance)
        return self.decoder(nnx.tanh(z)), mean, log_variance


def nnx_create(key: jax.Array) -> Any:
    model = NNXVAE(nnx.Rngs(key))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.Rngs(noise=3)


def nnx_step(model: Any, optimizer: Any, rngs: Any, batch: Any) -> Any:
    key = rngs.noise()

    def loss_fn(model: Any) -> jax.Array:
        return elbo(model(batch["x"], key), batch["x"])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


INTERACT = refused("cannot be accumulated over 4 micro-batches")
NOISE = told("noise in the batch's shape")

PROGRAMS = (
    Program("vae", create_vae, argument_step, keyed(vectors), accumulated=NOISE),
    Program(
        "vae_key_in_state",
        lambda key: create_vae(key, KeyedState, key=jax.random.key(3)),
        state_step, vectors, accumulated=NOISE,
    ),
    Program("gan_simultaneous", create_adversarial, simultaneous_step, real_and_noise),
    Program(
        "gan_alternating", create_adversarial, alternating_step, real_and_noise,
        accumulated=INTERACT,
    ),
    Program(
        "gan_two_states", create_two_states, two_states_step, real_and_noise,
        call=call_two_states, dtypes=("float64",),
    ),
    Program("nnx_vae", nnx_create, nnx_step, vectors, accumulated=NOISE, nnx=True),
)  # fmt: skip
