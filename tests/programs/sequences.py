"""Language models whose rows may be split along their tokens: a mesh with the axis "seq"."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from programs.program import ROWS, Program, creator
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.llama import Llama, LlamaConfig

T, V = 16, 32
TX = optax.adamw(1e-2, eps=1e-4)  # the gradient of a key's bias is rounding alone
EXAMPLE = np.zeros((1, T), np.int32)
# Two heads of keys and values for eight of queries: repeated where more devices share the tokens.
LLAMA = LlamaConfig(
    vocab_size=V, block_size=T, n_layer=4, n_head=8, n_kv_head=2, n_embd=32, n_inner=48, scan=True,
    remat=True, mlp_chunks=2, loss_chunks=2,
)  # fmt: skip
UNROLLED_LLAMA = LlamaConfig(
    vocab_size=V, block_size=T, n_layer=2, n_head=8, n_kv_head=4, n_embd=32, n_inner=48
)
GPT_2 = GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=8, n_embd=32)


def batch(rng: np.random.Generator) -> tuple[Any, ...]:
    """Tokens, targets and a mask over them, each [ROWS, T]."""
    rows = rng.integers(V, size=(ROWS, T + 1))
    mask = rng.integers(2, size=(ROWS, T)).astype(np.float64)
    return ({"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": mask},)


def step_of(model: nn.Module) -> Any:
    """A step with the mean loss of the tokens that the mask selects."""

    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            losses = model.apply({"params": params}, batch["tokens"], targets=batch["targets"])
            return zerojax.weighted_mean(losses, batch["mask"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


class Own(nn.Module):
    """A user's model with one line around attention; its step shifts the labels."""

    sequence: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(V, 16)(tokens)
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        q, k, v = (dense((8, 2), name=name)(x) for name in "qkv")
        attend = functools.partial(nn.dot_product_attention, mask=nn.make_causal_mask(tokens))
        attend = self.sequence.attention(attend) if self.sequence else attend
        return dense(V, axis=(-2, -1), name="out")(attend(q, k, v))


def own_step(model: nn.Module) -> Any:
    def step(state: TrainState, batch: Any) -> Any:
        tokens = batch["tokens"]
        seen = jnp.broadcast_to(jnp.arange(T) < T - 1, tokens.shape)

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.roll(tokens, -1, axis=1)
            )
            return zerojax.weighted_mean(losses, seen)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


def program(name: str, model: Any, step_of: Any = step_of) -> Program:
    """``model(sequence)`` for a mesh's sequence axis, None for one without."""
    return Program(
        name, creator(model(None), EXAMPLE, TX), step_of(model(None)), batch,
        step_on=lambda zero: step_of(model(zero.sequence)), tokens=True,
    )  # fmt: skip


PROGRAMS = (
    program("sequence_llama_scan", lambda sequence: Llama(LLAMA, sequence=sequence)),
    program("sequence_llama", lambda sequence: Llama(UNROLLED_LLAMA, sequence=sequence)),
    program("sequence_gpt", lambda sequence: GPT(GPT_2, sequence=sequence)),
    program("sequence_own", Own, own_step),
    program("sequence_unaware", lambda _: Own(None), own_step),
)
