"""Calls that BART and T5 share: a source is encoded once, and targets are decoded against it.

Shapes: B batch, S source, T target, D d_model, V vocab_size.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import keys_mask
from zerojax.models.cache import check_memory, visible
from zerojax.models.config import ModelConfig
from zerojax.models.loss import logits_or_losses


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
