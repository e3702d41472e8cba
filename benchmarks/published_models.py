"""The encoder of the published tables, shaped as DeBERTa-v2 XLarge.

Left out: dropout (the published runs had 0.1 of it), and the convolution after the first layer
(0.8% of the parameters). No block is rematerialised. The layers are scanned, so that they compile
in seconds.

    params = Encoder().init(jax.random.key(0), tokens)["params"]

Shapes: B batch, T time, D width, H heads, d = D / H, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.loss import widen

INIT = nn.initializers.normal(0.02)
gelu = functools.partial(nn.gelu, approximate=False)


class Attention(nn.Module):
    """x [B, T, D] looking at memory [B, S, D] -> [B, T, D], the softmax in fp32 or wider.

    With ``near`` [2 span, D], of each distance from -span to span, the scores are disentangled:
    (q_i . k_j + q_i . K near_(i-j) + k_j . Q near_(i-j)) / sqrt(3 d), K and Q the projections of
    keys and queries. Source: He et al. 2021, DeBERTa (arXiv:2006.03654). Needs T = S <= span.
    """

    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, near: jax.Array | None = None) -> jax.Array:
        width = x.shape[-1]
        query, key, value = (_dense(width, name) for name in ("query", "key", "value"))

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:-1], self.heads, -1)

        q, k, v = split(query(x)), split(key(memory)), split(value(memory))
        terms = 1 if near is None else 3
        q = q / math.sqrt(terms * q.shape[-1])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if near is not None:
            to_keys, to_queries = split(key(near)), split(query(near))
            rows = jnp.arange(x.shape[1])[:, None]
            at = near.shape[0] // 2 + rows - rows.T
            scores += jnp.einsum("bqhd,phd->bhqp", q, to_keys)[..., rows, at]
            k = k / math.sqrt(terms * k.shape[-1])
            other = jnp.einsum("bkhd,phd->bhkp", k, to_queries)[..., rows, at.T]
            scores += other.swapaxes(-1, -2)
        if self.causal:
            ahead = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(ahead, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(widen(scores)).astype(q.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return _dense(width, "out")(y.reshape(x.shape))


class FeedForward(nn.Module):
    """[B, T, D] -> [B, T, inner] -> gelu -> [B, T, D]."""

    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return _dense(x.shape[-1], "fc2")(gelu(_dense(self.inner, "fc1")(x)))


class PostNormBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)). The second result is a scan's."""

    heads: int
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array, near: jax.Array) -> tuple[jax.Array, None]:
        x = _norm("attention_norm")(x + Attention(self.heads, name="attention")(x, x, near))
        return _norm("norm")(x + FeedForward(self.inner, name="feed_forward")(x)), None


class Encoder(nn.Module):
    """Tokens int [B, T] -> logits [B, classes] from the first token."""

    vocab: int = 128100
    layers: int = 24
    heads: int = 24
    width: int = 1536
    inner: int = 6144
    span: int = 256
    classes: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = _norm("embeddings_norm")(_embed(self.vocab, self.width, "word_embeddings")(tokens))
        # A matrix product like the words', and not a lookup: all its rows are used.
        near = self.param("rel_embeddings", INIT, (2 * self.span, self.width))
        near = _norm("rel_norm")(near.astype(x.dtype))
        x = _stack(PostNormBlock, self.layers)(self.heads, self.inner, name="layers")(x, near)[0]
        pooled = gelu(_dense(self.width, "pooler")(x[:, 0]))
        return widen(_dense(self.classes, "classifier")(pooled))


def _stack(block: Callable[..., nn.Module], layers: int) -> Any:
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=layers,
    )


def _dense(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, kernel_init=INIT, name=name)


def _embed(rows: int, width: int, name: str) -> nn.Embed:
    return nn.Embed(rows, width, embedding_init=INIT, name=name)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(1e-5, name=name)
