"""Language models: masked, recurrent, mixtures of experts, encoder and decoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import zerojax
from programs.program import ADAM, ROWS, WIDTH, Program, creator, refused

LENGTH, VOCABULARY = 4, 16
TOKENS = np.ones((1, LENGTH), np.int32)


def padded(rng: np.random.Generator) -> tuple[Any, ...]:
    """Rows of different lengths; those of the first micro-batch are longest."""
    tokens = rng.integers(VOCABULARY, size=(ROWS, LENGTH + 1), dtype=np.int32)
    longest = np.repeat([4, 3, 2, 1], ROWS // 4)
    lengths = rng.integers(1, longest + 1)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    return ({"tokens": tokens[:, :-1], "next": tokens[:, 1:], "mask": mask},)


class Language(nn.Module):
    """Causal means of embedded tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(VOCABULARY, WIDTH)
        x = table(tokens)
        x = x + jnp.cumsum(x, 1) / (1 + jnp.arange(LENGTH))[:, None]
        return table.attend(nn.tanh(nn.Dense(WIDTH)(x)))


class Recurrent(nn.Module):
    """An LSTM."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        return nn.Dense(VOCABULARY)(nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x))


def losses_of(state: TrainState, params: Any, batch: Any) -> jax.Array:
    """[B, T]"""
    logits = state.apply_fn({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])


def masked_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        losses = losses_of(state, params, batch)
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "perplexity": jnp.exp(loss)}


def weighted_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        return zerojax.weighted_mean(losses_of(state, params, batch), batch["mask"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


class EncoderDecoder(nn.Module):
    """Attention from one sequence to another."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        table = nn.Embed(VOCABULARY, WIDTH)
        encoded = nn.LayerNorm()(nn.Dense(WIDTH)(table(source)))
        x = table(target)
        x = x + nn.MultiHeadDotProductAttention(2)(x, encoded)
        return nn.Dense(VOCABULARY)(x)


def translated(rng: np.random.Generator) -> tuple[Any, ...]:
    (batch,) = padded(rng)
    source = rng.integers(VOCABULARY, size=(ROWS, LENGTH), dtype=np.int32)
    return (batch | {"source": source},)


def translation_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """With label smoothing and a mask."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["source"], batch["tokens"])
        smooth = optax.smooth_labels(jax.nn.one_hot(batch["next"], VOCABULARY), 0.1)
        losses = optax.softmax_cross_entropy(logits, smooth)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def create_translator(key: jax.Array) -> TrainState:
    model = EncoderDecoder()
    params = model.init(key, TOKENS, TOKENS)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)


class Mixture(nn.Module):
    """Experts chosen by token. Returns logits, gates [B, T, E] and choices [B, T, E]."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        gates = nn.softmax(nn.Dense(4)(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), 4, dtype=gates.dtype)
        weights = self.param("experts", nn.initializers.lecun_normal(), (4, WIDTH, WIDTH))
        x = x + jnp.einsum("btd,edf,bte->btf", x, weights, gates * chosen)
        return nn.Dense(VOCABULARY)(x), gates, chosen


def mixture_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Balanced among all tokens."""

    def loss_fn(params: Any) -> Any:
        logits, gates, chosen = state.apply_fn({"params": params}, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        balance = 4 * jnp.sum(gates.mean((0, 1)) * chosen.mean((0, 1)), -1)
        return losses.mean() + 0.1 * balance, balance

    (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "balance": balance}


INTERACT = refused("cannot be accumulated over 4 micro-batches")
ONE_DTYPE = ("float32", "bfloat16")  # flax's recurrent layers start from float32

PROGRAMS = (
    Program("masked_language", creator(Language(), TOKENS), masked_step, padded),
    Program("weighted_language", creator(Language(), TOKENS), weighted_step, padded),
    Program("lstm", creator(Recurrent(), TOKENS), masked_step, padded, dtypes=ONE_DTYPE),
    Program("encoder_decoder", create_translator, translation_step, translated),
    Program("mixture", creator(Mixture(), TOKENS), mixture_step, padded, accumulated=INTERACT),
)
