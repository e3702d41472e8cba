"""Llama in flax linen: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Module names follow Hugging Face's (`embed_tokens`, `layers_0`, `self_attn.q_proj`, ...). Called as
`zerojax.models.gpt.GPT` is, so that one train step takes either. Nothing here knows of devices.

>>> model = Llama(LlamaConfig(**SIZES["llama-tiny"]))
>>> tokens = jnp.zeros((8, 16), jnp.int32)
>>> params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
>>> apply = jax.jit(model.apply)                        # logits [8, 16, 256] without targets
>>> apply({"params": params}, tokens, targets=tokens).shape
(8, 16)

Shapes: B batch, T time, D n_embd, H n_head, G n_kv_head, d = D / H, F n_inner, V vocab_size,
L n_layer.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.gpt import INIT_STD, attention
from zerojax.models.llama_config import SIZES as SIZES
from zerojax.models.llama_config import LlamaConfig as LlamaConfig
from zerojax.models.loss import cross_entropy, widen

Tables = tuple[jax.Array, jax.Array]


def rotary_tables(tokens: int, head_size: int, theta: float) -> Tables:
    """cos and sin, fp32 [T, 1, d / 2], of position x theta^(-2i / d) for each pair i.

    Source: Su et al. 2021, RoFormer (arXiv:2104.09864).

    >>> cos, sin = rotary_tables(3, 4, theta=10000.0)
    >>> cos.shape, [round(float(x), 4) for x in sin[:, 0, 0]]                # sin of 0, 1, 2
    ((3, 1, 2), [0.0, 0.8415, 0.9093])
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """[B, T, H, d] with each pair (i, i + d / 2) turned by its angle, computed in fp32 or wider.

    These are Hugging Face's pairs. Meta's own files pair 2i with 2i + 1, which permutes the rows of
    `q_proj` and `k_proj`.

    >>> x = jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    >>> quarter_turn = (jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))
    >>> rotate(x, quarter_turn).ravel().tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    cos, sin = tables
    low, high = jnp.split(widen(x), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of q [B, T, H, d] on k and v [B, T, G, d]: head h reads number h // (H / G).

    The keys and values are not repeated: the heads of a group are one more dimension of q alone.
    """
    grouped = q.reshape(*k.shape[:3], -1, q.shape[-1])
    one_of_each = jax.vmap(attention, (3, None, None), 3)
    return one_of_each(grouped, k, v).reshape(q.shape)


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], each position looking at itself and what came before."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, tables: Tables) -> jax.Array:
        c = self.config

        def heads(count: int, name: str) -> jax.Array:
            return _dense(count * c.head_size, c, name)(x).reshape(*x.shape[:2], count, -1)

        q, k = heads(c.n_head, "q_proj"), heads(c.kv_heads, "k_proj")
        v = heads(c.kv_heads, "v_proj")
        y = grouped_attention(rotate(q, tables), rotate(k, tables), v)
        return _dense(c.n_embd, c, "o_proj")(y.reshape(x.shape))


class MLP(nn.Module):
    """SwiGLU: [B, T, D] -> silu(gate) * up [B, T, F] -> [B, T, D]. Source: arXiv:2002.05202."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate, up = (_dense(c.n_inner, c, name)(x) for name in ("gate_proj", "up_proj"))
        return _dense(c.n_embd, c, "down_proj")(nn.silu(gate) * up)


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)). The second result is `nn.scan`'s."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, tables: Tables) -> tuple[jax.Array, None]:
        c = self.config
        normal = _rms_norm(c, "input_layernorm")(x)
        x = x + SelfAttention(c, name="self_attn")(normal, tables)
        return x + MLP(c, name="mlp")(_rms_norm(c, "post_attention_layernorm")(x)), None


class Llama(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    With targets int [B, T] the cross-entropy of each, [B, T], in place of the logits. There is no
    dropout: `deterministic` changes nothing.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(
        self, tokens: jax.Array, deterministic: bool = True, targets: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        if tokens.shape[1] > c.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens in a row, but block_size={c.block_size}")
        init = nn.initializers.normal(INIT_STD)
        embed = nn.Embed(
            c.vocab_size, c.n_embd, dtype=c.dtype, embedding_init=init, name="embed_tokens"
        )
        x, tables = embed(tokens), rotary_tables(tokens.shape[1], c.head_size, c.rope_theta)

        # Inside a scan nothing can be merged across layers, so the barrier would only cost.
        block = nn.remat(Block, prevent_cse=not c.scan) if c.remat else Block
        if c.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.n_layer,
            )
            x, _ = stack(c, name="layers")(x, tables)
        else:
            for i in range(c.n_layer):
                x, _ = block(c, name=f"layers_{i}")(x, tables)
        x = _rms_norm(c, "norm")(x)
        logits = embed.attend(x) if c.tie_word_embeddings else _dense(c.vocab_size, c, "lm_head")(x)
        return widen(logits) if targets is None else cross_entropy(widen(logits), targets)


def _dense(features: int, c: LlamaConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(INIT_STD)
    return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)


def _rms_norm(c: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(c.rms_norm_eps, dtype=c.dtype, name=name)
