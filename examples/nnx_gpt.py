"""GPT-2 in flax NNX, to copy: the parameters' names and shapes are those of `zerojax.models.gpt`.

With `positions` its attention keeps keys and values between tokens, so that `zerojax.generate`
takes the model as it is:

    model = GPT(GPTConfig(**SIZES["mini"]), rngs=nnx.Rngs(params=0, dropout=1))
    logits = model(tokens)                                  # int [B, T] -> [B, T, V]
    rows = zerojax.generate(model, None, tokens, max_new_tokens=64)

Shapes: B rows, T tokens, D n_embd, V vocab_size.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from zerojax.models.blocks import (
    INIT_STD,
    causal_attention,
    check_length,
    policy_of,
    split_heads,
)
from zerojax.models.cache import attend_cached
from zerojax.models.gpt import LAYER_NORM_EPS, GPTConfig


class SelfAttention(nnx.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        c = config
        self.n_head = c.n_head
        self.c_attn = _linear(c.n_embd, 3 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj = _linear(c.n_embd, c.n_embd, c.residual_std, c, rngs)
        self.dropout = _dropout(c, rngs)

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> None:
        """Creates the keys and values of rows [B, S, D], by default in the compute dtype."""
        rows, positions, _ = input_shape
        shape = rows, self.n_head, positions, self.c_proj.in_features // self.n_head
        if dtype is None:
            dtype = self.c_attn.dtype or self.c_attn.kernel.dtype
        self.key = nnx.Cache(jnp.zeros(shape, dtype))
        self.value = nnx.Cache(jnp.zeros(shape, dtype))

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        heads = jnp.split(self.c_attn(x), 3, axis=-1)
        q, k, v = (split_heads(a, self.n_head) for a in heads)
        attention = functools.partial(causal_attention, dropout=self.dropout)
        y = attend_cached(self, attention, causal_attention, q, k, v, positions)
        return self.c_proj(y.reshape(x.shape))


class MLP(nnx.Module):
    """[B, T, D] -> [B, T, 4D] -> gelu -> [B, T, D]."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        c = config
        self.c_fc = _linear(c.n_embd, 4 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj = _linear(4 * c.n_embd, c.n_embd, c.residual_std, c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(nnx.gelu(self.c_fc(x), approximate=True))


class Block(nnx.Module):
    """x + attn(ln(x)), then x + mlp(ln(x))."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.ln_1 = _layer_norm(config, rngs)
        self.attn = SelfAttention(config, rngs)
        self.ln_2 = _layer_norm(config, rngs)
        self.mlp = MLP(config, rngs)
        self.dropout = _dropout(config, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = x + self.dropout(self.attn(self.ln_1(x), positions))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nnx.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    With `positions` int [B, T] keys and values are kept, see `zerojax.models.cache`.
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.wte = _embed(config.vocab_size, config, rngs)
        self.wpe = _embed(config.block_size, config, rngs)
        self.dropout = _dropout(config, rngs)
        for i in range(config.n_layer):  # h_0, h_1, ... as linen names them
            setattr(self, f"h_{i}", Block(config, rngs))
        self.ln_f = _layer_norm(config, rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        c = self.config
        check_length(tokens, c, "block_size")
        at = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = self.dropout(self.wte(tokens) + self.wpe(at))
        run_block = nnx.remat(_run_block, policy=policy_of(c.remat)) if c.remat else _run_block
        for i in range(c.n_layer):
            x = run_block(getattr(self, f"h_{i}"), x, positions)
        logits = self.wte.attend(self.ln_f(x))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _run_block(block: Block, x: jax.Array, positions: jax.Array | None) -> jax.Array:
    return block(x, positions)


def _linear(n_in: int, n_out: int, std: float, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(n_in, n_out, dtype=c.dtype, kernel_init=init, rngs=rngs)


def _embed(rows: int, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Embed(rows, c.n_embd, dtype=c.dtype, embedding_init=init, rngs=rngs)


def _layer_norm(c: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(c.n_embd, epsilon=LAYER_NORM_EPS, dtype=c.dtype, rngs=rngs)


def _dropout(c: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns dropout; at rate 0 without a random stream, so that the state is only parameters."""
    return nnx.Dropout(c.dropout, rngs=rngs if c.dropout else None)
