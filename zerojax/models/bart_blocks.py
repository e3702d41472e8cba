"""Blocks of BART's encoder and decoder, with keys and values cached between tokens.

Shapes: B batch, S source, T target, D d_model, H heads, d = D / H.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.bart_config import BartConfig
from zerojax.models.layers import attend, split_heads

LAYER_NORM_EPS = 1e-5

KeysValues = tuple[jax.Array, jax.Array]  # [B, S, H, d] each


class Attention(nn.Module):
    """Attention of x [B, T, D] to `source` [B, S, D], or to `cached` keys and values without it.

    Keys and values of a source are written into the cached ones from `position` on. Returns the
    output [B, T, D], and the keys and values.
    """

    config: BartConfig
    heads: int
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | None,
        mask: jax.Array | None,
        cached: KeysValues | None = None,
        position: jax.Array | int = 0,
    ) -> tuple[jax.Array, KeysValues]:
        c = self.config

        def project(x: jax.Array, name: str) -> jax.Array:
            return split_heads(dense(c.d_model, c, name)(x), self.heads)

        q = project(x, "q_proj")
        if source is None:
            assert cached is not None
            k, v = cached
        else:
            k, v = project(source, "k_proj"), project(source, "v_proj")
            if cached is not None:
                k, v = (
                    jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, 1)
                    for old, new in zip(cached, (k, v), strict=True)
                )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k)
        dropout = nn.Dropout(c.attention_dropout, deterministic=self.deterministic)
        y = attend(scores, v, mask, dropout).reshape(x.shape)
        return dense(c.d_model, c, "out_proj")(y), (k, v)


class EncoderBlock(nn.Module):
    """Attention to all of x [B, S, D], then an MLP. The second argument and result are `scan`'s."""

    config: BartConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None, mask: jax.Array | None) -> tuple[jax.Array, None]:
        c, block_input = self.config, x
        self_attention = Attention(
            c, c.encoder_attention_heads, self.deterministic, name="self_attn"
        )
        branch, mlp = _branch(c, self.deterministic), _mlp(c, c.encoder_ffn_dim, self.deterministic)
        x, _ = branch(x, "self_attn_layer_norm", lambda x: self_attention(x, x, mask))
        x, _ = branch(x, "final_layer_norm", mlp)
        return _layer_drop(self, c.encoder_layerdrop, block_input, x), None


class DecoderBlock(nn.Module):
    """Attention to x [B, T, D], then to the memory [B, S, D], then an MLP.

    A cache is a pair of the block's self-attention keys and values, and those of the memory (None
    before the first call). The block returns the updated cache.
    """

    config: BartConfig
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        cache: tuple[KeysValues, KeysValues | None] | None,
        memory: jax.Array | None,
        mask: jax.Array | None,
        memory_mask: jax.Array | None,
        position: jax.Array | int,
    ) -> tuple[jax.Array, Any]:
        c, block_input, (self_cache, memorized) = self.config, x, cache or (None, None)
        self_attention, cross_attention = (
            Attention(c, c.decoder_attention_heads, self.deterministic, name=name)
            for name in ("self_attn", "encoder_attn")
        )
        branch, mlp = _branch(c, self.deterministic), _mlp(c, c.decoder_ffn_dim, self.deterministic)
        x, self_cache = branch(
            x, "self_attn_layer_norm", lambda x: self_attention(x, x, mask, self_cache, position)
        )
        x, memorized = branch(
            x,
            "encoder_attn_layer_norm",
            lambda x: cross_attention(x, memory, memory_mask, memorized),
        )
        x, _ = branch(x, "final_layer_norm", mlp)
        x = _layer_drop(self, c.decoder_layerdrop, block_input, x)
        return x, None if cache is None else (self_cache, memorized)


def _branch(c: BartConfig, deterministic: bool) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns a function for x + f(norm(x)) or norm(x + f(x)), and the second result of f."""

    def branch(
        x: jax.Array, norm: str, f: Callable[[jax.Array], tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any]:
        norm_layer = layer_norm(c, norm)
        y, extra = f(norm_layer(x) if c.normalize_before else x)
        x = x + nn.Dropout(c.dropout, deterministic=deterministic)(y)
        return (x if c.normalize_before else norm_layer(x)), extra

    return branch


def _mlp(
    c: BartConfig, width: int, deterministic: bool
) -> Callable[[jax.Array], tuple[jax.Array, None]]:
    """Returns an MLP [B, T, D] -> gelu [B, T, width] -> [B, T, D]."""

    def mlp(x: jax.Array) -> tuple[jax.Array, None]:
        h = nn.gelu(dense(width, c, "fc1")(x), approximate=False)
        h = nn.Dropout(c.activation_dropout, deterministic=deterministic)(h)
        return dense(c.d_model, c, "fc2")(h), None

    return mlp


def _layer_drop(block: Any, rate: float, before: jax.Array, after: jax.Array) -> jax.Array:
    """Applies LayerDrop: skips the block at this rate, for all rows at once. arXiv:1909.11556."""
    if block.deterministic or not rate:
        return after
    return jnp.where(jax.random.bernoulli(block.make_rng("dropout"), rate), before, after)


def dense(features: int, c: BartConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(c.init_std)
    return nn.Dense(features, dtype=c.dtype, kernel_init=init, name=name)


def embed(rows: int, c: BartConfig, name: str | None = None) -> nn.Embed:
    init = nn.initializers.normal(c.init_std)
    return nn.Embed(rows, c.d_model, dtype=c.dtype, embedding_init=init, name=name)


def layer_norm(c: BartConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name=name)
