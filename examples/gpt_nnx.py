"""GPT-2 in flax NNX: the twin of `examples.gpt`, with the same parameter names and shapes.

`nnx.to_pure_dict(nnx.state(model, nnx.Param))` is the `params` of the linen model with
`scan=False`, and both give the same logits from them.

Example::

    model = GPT(GPTConfig(**SIZES["mini"]), rngs=nnx.Rngs(params=0, dropout=1))
    logits = model(tokens)                                  # int [B, T] -> [B, T, V]
    model.eval()                                            # dropout off

Shapes as in `examples.gpt`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from examples.gpt import INIT_STD, LAYER_NORM_EPS, GPTConfig, attention
from examples.loss import loss_fn as loss_fn
from examples.loss import widen


class SelfAttention(nnx.Module):
    """[B, T, D] -> [B, T, D], each position looking at itself and what came before."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        c = config
        self.n_head = c.n_head
        self.c_attn = _linear(c.n_embd, 3 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj = _linear(c.n_embd, c.n_embd, c.residual_std, c, rngs)
        self.dropout = _dropout(c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = jnp.split(self.c_attn(x), 3, axis=-1)
        q, k, v = (a.reshape(*x.shape[:2], self.n_head, -1) for a in qkv)
        return self.c_proj(attention(q, k, v, self.dropout).reshape(x.shape))


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

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nnx.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        if config.scan:
            raise ValueError("the NNX GPT has no stacked layout: use GPTConfig(scan=False)")
        self.config = config
        self.wte = _embed(config.vocab_size, config, rngs)
        self.wpe = _embed(config.block_size, config, rngs)
        self.dropout = _dropout(config, rngs)
        for i in range(config.n_layer):  # h_0, h_1, ... as linen names them
            setattr(self, f"h_{i}", Block(config, rngs))
        self.ln_f = _layer_norm(config, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        if tokens.shape[1] > c.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens in a row, but block_size={c.block_size}")
        x = self.dropout(self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1])))
        run_block = nnx.remat(_run_block) if c.remat else _run_block
        for i in range(c.n_layer):
            x = run_block(getattr(self, f"h_{i}"), x)
        return widen(self.wte.attend(self.ln_f(x)))


def _run_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


def _linear(n_in: int, n_out: int, std: float, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(n_in, n_out, dtype=c.dtype, kernel_init=init, rngs=rngs)


def _embed(rows: int, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Embed(rows, c.n_embd, dtype=c.dtype, embedding_init=init, rngs=rngs)


def _layer_norm(c: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(c.n_embd, epsilon=LAYER_NORM_EPS, dtype=c.dtype, rngs=rngs)


def _dropout(c: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Without dropout there is no random stream either: the state is parameters alone."""
    return nnx.Dropout(c.dropout, rngs=rngs if c.dropout else None)
