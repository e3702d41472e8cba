"""BART and BlenderBot in flax linen: a single model, with a config for each.

The encoder, the decoder and the output share one token embedding table; learned positions, exact
GELU, biases everywhere. Sources: Lewis et al. 2019, BART (arXiv:1910.13461), Roller et al. 2020,
BlenderBot (arXiv:2004.13637), and Hugging Face, whose names the config and the modules have.

>>> model = Bart(BartConfig(**SIZES["blenderbot-tiny"]))
>>> source, target = jnp.ones((8, 16), jnp.int32), jnp.ones((8, 12), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, target)     # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, source, target, source > 0)
ShapeDtypeStruct(shape=(8, 12, 96), dtype=float32)

`zerojax.models.beam_search.generate` generates targets. Shapes: B batch, S source, T target,
D d_model, H heads, d = D / H, V vocab_size, L layers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.bart_blocks import DecoderBlock, EncoderBlock, embed, layer_norm
from zerojax.models.bart_config import SIZES as SIZES
from zerojax.models.bart_config import BartConfig as BartConfig
from zerojax.models.layers import run_blocks
from zerojax.models.loss import cross_entropy, widen


class Stack(nn.Module):
    """All blocks of the encoder or the decoder, applied to embedded tokens [B, T, D]."""

    config: BartConfig
    block: type[nn.Module]
    layers: int

    @nn.compact
    def __call__(
        self, x: jax.Array, places: jax.Array, deterministic: bool, *inputs: Any, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        c = self.config
        rows = c.max_position_embeddings + c.position_offset
        x += embed(rows, c, "embed_positions")(places + c.position_offset)
        if c.normalize_embedding:
            x = layer_norm(c, "layernorm_embedding")(x)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        x, cache = run_blocks(
            self.block, (c, deterministic), x, *inputs,
            layers=range(self.layers), name="layers", scan=c.scan, remat=c.remat, each=cache,
        )  # fmt: skip
        return layer_norm(c, "layer_norm")(x) if c.add_final_layer_norm else x, cache


class Bart(nn.Module):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V] in fp32 or wider.

    Logits at t predict the token after `decoder_input_ids[:, t]`; `shifted` computes these inputs
    from labels. Masks [B, S] and [B, T] are 0 or False on padding. With targets int [B, T] the
    result is each one's cross-entropy, [B, T]. `deterministic=False` needs `rngs={"dropout": key}`.
    """

    config: BartConfig

    def setup(self) -> None:
        c = self.config
        self.shared = embed(c.vocab_size, c)
        self.encoder = Stack(c, EncoderBlock, c.encoder_layers)
        self.decoder = Stack(c, DecoderBlock, c.decoder_layers)
        if c.add_logits_bias:
            zeros = nn.initializers.zeros
            self.final_logits_bias = self.param("final_logits_bias", zeros, (1, c.vocab_size))

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
        x, _ = self.decoder(
            self._embedded(decoder_input_ids), jnp.arange(tokens), deterministic,
            memory, mask, _keys(attention_mask), 0,
        )  # fmt: skip
        logits = self._logits(x)
        return logits if targets is None else cross_entropy(logits, targets)

    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Encodes a source [B, S] as a memory [B, S, D]."""
        x, positions = self._embedded(input_ids), jnp.arange(input_ids.shape[1])
        return self.encoder(x, positions, deterministic, _keys(attention_mask))[0]

    def decode(
        self,
        tokens: jax.Array,
        position: jax.Array | int,
        cache: Any,
        memorized: Any = None,
        memory: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Returns logits [B, V] after the tokens [B] at this position, `cache` and `memorized`.

        `cache` has the keys and values of the positions before, from `empty_cache` or the previous
        call; `memorized` has those of the memory. The first call takes the memory [B, S, D] and
        returns `memorized` for the next calls. `attention_mask` [B, S] is the source's.
        """
        scan, length = self.config.scan, jax.tree.leaves(cache)[0].shape[-3]
        caches: Any = (cache, memorized)
        if not scan:
            caches = [*zip(cache, memorized or [None] * len(cache), strict=True)]
        x, caches = self.decoder(
            self._embedded(tokens[:, None]), jnp.asarray(position)[None], True,
            memory, jnp.arange(length) <= position, _keys(attention_mask), position, cache=caches,
        )  # fmt: skip
        cache, memorized = caches if scan else zip(*caches, strict=True)
        return self._logits(x)[:, 0], cache, memorized

    def empty_cache(self, rows: int, length: int) -> Any:
        """Returns the empty cache for `rows` targets of up to `length` tokens."""
        c, layers = self.config, self.config.decoder_layers
        heads = c.decoder_attention_heads
        shape = (rows, length, heads, c.d_model // heads)
        dtype = c.dtype or self.shared.embedding.dtype
        if c.scan:
            return (jnp.zeros((layers, *shape), dtype),) * 2
        return ((jnp.zeros(shape, dtype),) * 2,) * layers

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        if tokens.shape[1] > c.max_position_embeddings:
            raise ValueError(
                f"{tokens.shape[1]} tokens in a row, but max_position_embeddings = "
                f"{c.max_position_embeddings}"
            )
        return self.shared(tokens) * (math.sqrt(c.d_model) if c.scale_embedding else 1)

    def _logits(self, x: jax.Array) -> jax.Array:
        logits = widen(self.shared.attend(x))
        if not self.config.add_logits_bias:
            return logits
        return logits + jax.lax.stop_gradient(self.final_logits_bias)


def shifted(labels: jax.Array, config: BartConfig) -> jax.Array:
    """Returns the decoder's input for labels int [B, T]: the start token, all but the last label.

    Negative labels, such as the -100 that transformers excludes from a loss, become padding.

    >>> shifted(jnp.array([[5, 6, 2, -100, -100]]), BartConfig(**SIZES["blenderbot-tiny"]))
    Array([[1, 5, 6, 2, 0]], dtype=int32)
    """
    start = jnp.full_like(labels[:, :1], config.decoder_start_token_id)
    inputs = jnp.concatenate([start, labels[:, :-1]], axis=1)
    return jnp.where(inputs < 0, config.pad_token_id, inputs)


def _keys(mask: jax.Array | None) -> jax.Array | None:
    """Broadcasts a mask of keys [B, S] for scores [B, H, T, S]."""
    return None if mask is None else mask[:, None, None, :].astype(bool)
