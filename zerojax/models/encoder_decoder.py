"""Blocks and calls of BART and T5: a source is encoded once, and targets are decoded against it.

Shapes: B batch, S source, T target, K keys, D d_model, H heads, d features of a head, F features of
an MLP, V vocab_size.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import attend, keys_mask, split_heads
from zerojax.models.cache import attend_cached, check_memory, remembered, visible
from zerojax.models.config import ModelConfig, Size
from zerojax.models.loss import logits_or_losses

Activation = Callable[[jax.Array], jax.Array]

Branch = Callable[[nn.Module, jax.Array], jax.Array]
"""A function of x [B, T, D] to [B, T, D], with the variables of the module."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """A family's config, and the layers of its blocks.

    Attributes:
      branches: Names of the attention to x, of a decoder's to the memory, and of the MLP.
      projections: Names of the layers of queries, keys, values and results.
      scales_scores: Whether scores are divided by the root of d.
      norms_inside: Whether a branch is a module with its norm. Otherwise the norm is beside the
        module of an attention, and an MLP has none.
    """

    vocab_size: Size
    d_model: Size

    branches: ClassVar = ("self_attn", "encoder_attn", "final")
    projections: ClassVar = ("q_proj", "k_proj", "v_proj", "out_proj")
    scales_scores: ClassVar = True
    norms_inside: ClassVar = False

    @property
    def norms_sums(self) -> bool:
        """True for branches norm(x + f(x)), False for x + f(norm(x))."""
        return False

    def sizes(self, is_decoder: bool) -> tuple[int, int, int]:
        """Returns H, d and F of the encoder or the decoder."""
        raise NotImplementedError

    def rates(self) -> tuple[float, float, float]:
        """Returns the dropout rates of branches, of attention weights and of F features."""
        raise NotImplementedError

    def mlp(self) -> tuple[Activation, tuple[str, ...], str]:
        """Returns the activation, the names of the first layer and its factors, and the last's."""
        raise NotImplementedError

    def dense(self, features: int, name: str) -> nn.Dense:
        """Creates the layer of that name."""
        raise NotImplementedError

    def norm(self, name: str) -> nn.Module:
        """Creates the norm of that name."""
        raise NotImplementedError


class Scope(nn.Module):
    """A module of a name of its own for the layers of a branch."""

    branch: Branch

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.branch(self, x)


class Block(nn.Module):
    """Attention to x [B, T, D], in a decoder also to the memory [B, S, D], then an MLP.

    The second argument and result are `nn.scan`'s. `bias` [H, T, K] or [B, H, T, K] is added to the
    scores of x. With `positions` int [B, T] keys and values are kept, see `zerojax.models.cache`.
    """

    config: EncoderDecoderConfig
    deterministic: bool
    is_decoder: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        _: None,
        mask: jax.Array | None,
        bias: jax.Array | None,
        memory: jax.Array | None = None,
        memory_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        c = self.config
        heads, size, _width = c.sizes(self.is_decoder)
        query, key, value, output = c.projections

        def attention(module: nn.Module, x: jax.Array, to_memory: bool) -> jax.Array:
            dropout = self._dropout(1)

            def project(x: jax.Array | None, name: str) -> jax.Array:
                return split_heads(c.dense(heads * size, name)(x), heads)

            def keys_values() -> tuple[jax.Array, jax.Array, jax.Array | None]:
                source = memory if to_memory else x
                seen = memory_mask if to_memory else mask
                return project(source, key), project(source, value), seen

            def run(q: jax.Array, k: jax.Array, v: jax.Array, **_: jax.Array) -> jax.Array:
                scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
                if bias is not None and not to_memory:
                    scores += bias
                return attend(scores, v, seen, dropout)

            q = project(x, query)
            if c.scales_scores:
                q = q / math.sqrt(size)
            if to_memory:
                k, v, seen = remembered(module, positions, keys_values)
                y = run(q, k, v)
            else:
                k, v, seen = keys_values()
                y = attend_cached(module, run, run, q, k, v, positions)
            return c.dense(c.d_model, output)(y.reshape(*x.shape[:-1], heads * size))

        to_itself, to_memory, mlp = c.branches
        x = self._residual(to_itself, partial(attention, to_memory=False), x)
        if self.is_decoder:
            x = self._residual(to_memory, partial(attention, to_memory=True), x)
        return self._residual(mlp, self._mlp, x), None

    @nn.nowrap
    def _residual(self, name: str, branch: Branch, x: jax.Array) -> jax.Array:
        """Adds a branch with its norm to x [B, T, D]."""
        c = self.config

        def run(module: nn.Module, x: jax.Array) -> jax.Array:
            norm = c.norm("layer_norm" if c.norms_inside else f"{name}_layer_norm")
            y = x if c.norms_sums else norm(x)
            has_module = not c.norms_inside and name != c.branches[-1]
            y = Scope(branch, name=name)(y) if has_module else branch(module, y)
            x = x + self._dropout(0)(y)
            return norm(x) if c.norms_sums else x

        return Scope(run, name=name)(x) if c.norms_inside else run(self, x)

    @nn.nowrap
    def _mlp(self, _: nn.Module, x: jax.Array) -> jax.Array:
        """Computes the MLP of x [B, T, D]."""
        c = self.config
        activation, (first, *factors), last = c.mlp()
        width = c.sizes(self.is_decoder)[2]
        h = activation(c.dense(width, first)(x))
        for factor in factors:
            h = h * c.dense(width, factor)(x)
        return c.dense(c.d_model, last)(self._dropout(2)(h))

    @nn.nowrap
    def _dropout(self, which: int) -> nn.Dropout:
        return nn.Dropout(self.config.rates()[which], deterministic=self.deterministic)


class EncoderDecoder(nn.Module):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V] in fp32 or wider.

    Logits at t predict the token after `decoder_input_ids[:, t]`. Masks [B, S] and [B, T] are 0 or
    False on padding. With targets int [B, T] the result is each one's cross-entropy, [B, T].
    `deterministic=False` needs `rngs={"dropout": key}`.

    A subclass's `setup` makes `encoder(x, positions, deterministic, mask)` and `decoder(x,
    positions, deterministic, mask, memory, memory_mask, cache_positions)`, both of embedded tokens.
    """

    config: ModelConfig

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Embeds tokens [B, T] as [B, T, D]."""
        raise NotImplementedError

    def logits(self, x: jax.Array) -> jax.Array:
        """Computes logits [B, T, V] of the decoder's output [B, T, D]."""
        raise NotImplementedError

    def __call__(
        self,
        input_ids: jax.Array,
        decoder_input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
        deterministic: bool = True,
        targets: jax.Array | None = None,
    ) -> jax.Array:
        tokens = decoder_input_ids.shape[1]
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))
        if decoder_attention_mask is not None:
            mask = mask & decoder_attention_mask[:, None, None, :].astype(bool)
        memory = self.encode(input_ids, attention_mask, deterministic)
        x = self.decoder(
            self.embedded(decoder_input_ids), jnp.arange(tokens), deterministic,
            mask, memory, keys_mask(attention_mask), None,
        )  # fmt: skip
        return logits_or_losses(self.logits(x), targets)

    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Encodes a source [B, S] as a memory [B, S, D]."""
        x, positions = self.embedded(input_ids), jnp.arange(input_ids.shape[1])
        result: jax.Array = self.encoder(x, positions, deterministic, keys_mask(attention_mask))
        return result

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        memory: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits [B, T, V] after target tokens [B, T] at positions [B, T].

        `zerojax.models.cache` says what it keeps. The first call takes the memory [B, S, D], and
        `attention_mask` [B, S] of the source.
        """
        check_memory(self, memory)
        x = self.decoder(
            self.embedded(tokens), positions, True,
            visible(self, positions), memory, keys_mask(attention_mask), positions,
        )  # fmt: skip
        return self.logits(x)
