"""BART and BlenderBot in flax linen, one by the config of the other.

One table of tokens for the encoder, the decoder and the output; learned positions, exact GELU,
biases everywhere. Sources: Lewis et al. 2019, BART (arXiv:1910.13461), Roller et al. 2020,
BlenderBot (arXiv:2004.13637), and Hugging Face, whose names the config and the modules have.

>>> model = Bart(BartConfig(**SIZES["blenderbot-tiny"]))
>>> source, target = jnp.ones((8, 16), jnp.int32), jnp.ones((8, 12), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, target)     # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, source, target, source > 0)
ShapeDtypeStruct(shape=(8, 12, 96), dtype=float32)

`zerojax.models.beam_search.generate` writes targets. Shapes: B batch, S source, T target,
D d_model, H heads, d = D / H, V vocab_size, L layers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.checks import dropout_rates, even_heads, positive_sizes
from zerojax.models.layers import attend, run_blocks, split_heads
from zerojax.models.loss import cross_entropy, widen

LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig:
    """The sizes and options of a BART, by Hugging Face's names; those of `BLENDERBOT` turn it.

    `dtype=None` computes in the parameters' own dtype; LayerNorm's statistics, the softmax, the
    logits and the loss are always in fp32. `scan` stacks the blocks' parameters to `[L, ...]`
    leaves and compiles one block, not L. `remat` keeps each block's input only and computes the
    rest again in the backward pass.
    """

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    max_position_embeddings: int
    normalize_before: bool = False  # a norm at the start of each branch, not after the sum
    normalize_embedding: bool = True
    add_final_layer_norm: bool = False
    position_offset: int = 2  # rows of the table of positions that no position reads
    add_logits_bias: bool = False  # one that no gradient changes
    scale_embedding: bool = False  # tokens times sqrt(D)
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    encoder_layerdrop: float = 0.0  # the chance that a whole block is left out
    decoder_layerdrop: float = 0.0
    init_std: float = 0.02
    pad_token_id: int = 1
    eos_token_id: int = 2
    decoder_start_token_id: int = 2
    scan: bool = False
    remat: bool = False
    dtype: Any = None

    def __post_init__(self) -> None:
        positive_sizes(
            self,
            *("vocab_size", "d_model", "encoder_layers", "decoder_layers"),
            *("encoder_attention_heads", "decoder_attention_heads"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"),
        )
        even_heads(self, "d_model", "encoder_attention_heads")
        even_heads(self, "d_model", "decoder_attention_heads")
        dropout_rates(self, "dropout", "attention_dropout", "activation_dropout")
        dropout_rates(self, "encoder_layerdrop", "decoder_layerdrop")


BLENDERBOT: dict[str, Any] = dict(
    normalize_before=True, normalize_embedding=False, add_final_layer_norm=True, position_offset=0,
    scale_embedding=True, pad_token_id=0, decoder_start_token_id=1,
)  # fmt: skip


def _size(layers: tuple[int, int], heads: int, width: int, **other: Any) -> dict[str, Any]:
    return dict(
        encoder_layers=layers[0], decoder_layers=layers[1], d_model=width,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
    ) | other  # fmt: skip


# Parameters; the second are those of Hugging Face's `facebook/blenderbot-400M-distill`.
SIZES: dict[str, dict[str, Any]] = {
    "blenderbot-tiny": _size(
        (2, 2), 4, 32, vocab_size=96, max_position_embeddings=24, dropout=0.0, **BLENDERBOT
    ),
    "blenderbot-400m": _size(
        (2, 12), 32, 1280, vocab_size=8008, max_position_embeddings=128, **BLENDERBOT
    ),  # 364,802,560
    "bart-large": _size(
        (12, 12), 16, 1024, vocab_size=50265, max_position_embeddings=1024
    ),  # 406,291,456
}

KeysValues = tuple[jax.Array, jax.Array]  # [B, S, H, d] each


class Attention(nn.Module):
    """[B, T, D] reads from `source` [B, S, D], or where that is None from `cached` keys and values.

    Keys and values of a source are written into the cached ones from `position` on. Returns what
    was read, [B, T, D], and the keys and values.
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
            return split_heads(_dense(c.d_model, c, name)(x), self.heads)

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
        return _dense(c.d_model, c, "out_proj")(y), (k, v)


class EncoderBlock(nn.Module):
    """Attention to all of x [B, S, D], then an MLP. The second argument and result are `scan`'s."""

    config: BartConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None, mask: jax.Array | None) -> tuple[jax.Array, None]:
        c, before = self.config, x
        read = Attention(c, c.encoder_attention_heads, self.deterministic, name="self_attn")
        branch, mlp = _branch(c, self.deterministic), _mlp(c, c.encoder_ffn_dim, self.deterministic)
        x, _ = branch(x, "self_attn_layer_norm", lambda x: read(x, x, mask))
        x, _ = branch(x, "final_layer_norm", mlp)
        return _left_out(self, c.encoder_layerdrop, before, x), None


class DecoderBlock(nn.Module):
    """Attention to x [B, T, D], then to the memory [B, S, D], then an MLP.

    A cache is a block's own keys and values, and those of the memory, None before the first call;
    it is returned as it is after this one.
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
        c, before, (own, memorized) = self.config, x, cache or (None, None)
        read, look = (
            Attention(c, c.decoder_attention_heads, self.deterministic, name=name)
            for name in ("self_attn", "encoder_attn")
        )
        branch, mlp = _branch(c, self.deterministic), _mlp(c, c.decoder_ffn_dim, self.deterministic)
        x, own = branch(x, "self_attn_layer_norm", lambda x: read(x, x, mask, own, position))
        x, memorized = branch(
            x, "encoder_attn_layer_norm", lambda x: look(x, memory, memory_mask, memorized)
        )
        x, _ = branch(x, "final_layer_norm", mlp)
        x = _left_out(self, c.decoder_layerdrop, before, x)
        return x, None if cache is None else (own, memorized)


class Stack(nn.Module):
    """Embedded tokens [B, T, D] and their positions through all blocks of a side."""

    config: BartConfig
    block: type[nn.Module]
    layers: int

    @nn.compact
    def __call__(
        self, x: jax.Array, places: jax.Array, deterministic: bool, *inputs: Any, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        c = self.config
        rows = c.max_position_embeddings + c.position_offset
        x += _embed(rows, c, "embed_positions")(places + c.position_offset)
        if c.normalize_embedding:
            x = _layer_norm(c, "layernorm_embedding")(x)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        x, cache = run_blocks(
            self.block, (c, deterministic), x, *inputs,
            layers=range(self.layers), name="layers", scan=c.scan, remat=c.remat, each=cache,
        )  # fmt: skip
        return _layer_norm(c, "layer_norm")(x) if c.add_final_layer_norm else x, cache


class Bart(nn.Module):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V] in fp32 or wider.

    Logits at t are of the token after `decoder_input_ids[:, t]`; `shifted` makes these of labels.
    Masks [B, S] and [B, T] are 0 or False on padding. With targets int [B, T] the result is the
    cross-entropy of each, [B, T]. `deterministic=False` wants `rngs={"dropout": key}`.
    """

    config: BartConfig

    def setup(self) -> None:
        c = self.config
        self.shared = _embed(c.vocab_size, c)
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
        """The memory [B, S, D] of a source [B, S]."""
        x, places = self._embedded(input_ids), jnp.arange(input_ids.shape[1])
        return self.encoder(x, places, deterministic, _keys(attention_mask))[0]

    def decode(
        self,
        tokens: jax.Array,
        position: jax.Array | int,
        cache: Any,
        memorized: Any = None,
        memory: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Logits [B, V] after the tokens [B] at this position.

        `cache` holds the keys and values of the positions before, as `empty_cache` and each call
        return them; `memorized` those of the memory, as the first call returns them, which takes
        the memory [B, S, D] itself. `attention_mask` [B, S] is the source's.
        """
        scan, length = self.config.scan, jax.tree.leaves(cache)[0].shape[-3]
        each: Any = (cache, memorized)
        if not scan:
            each = [*zip(cache, memorized or [None] * len(cache), strict=True)]
        x, each = self.decoder(
            self._embedded(tokens[:, None]), jnp.asarray(position)[None], True,
            memory, jnp.arange(length) <= position, _keys(attention_mask), position, cache=each,
        )  # fmt: skip
        cache, memorized = each if scan else zip(*each, strict=True)
        return self._logits(x)[:, 0], cache, memorized

    def empty_cache(self, rows: int, length: int) -> Any:
        """That of `rows` targets of up to `length` tokens."""
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
    """The decoder's input for labels int [B, T]: the start token, then all but the last label.

    >>> shifted(jnp.array([[5, 6, 2]]), BartConfig(**SIZES["blenderbot-tiny"]))
    Array([[1, 5, 6]], dtype=int32)
    """
    start = jnp.full_like(labels[:, :1], config.decoder_start_token_id)
    return jnp.concatenate([start, labels[:, :-1]], axis=1)


def _keys(mask: jax.Array | None) -> jax.Array | None:
    """A mask of keys [B, S] for scores [B, H, T, S]."""
    return None if mask is None else mask[:, None, None, :].astype(bool)


def _branch(c: BartConfig, deterministic: bool) -> Callable[..., tuple[jax.Array, Any]]:
    """x + f(norm(x)), or norm(x + f(x)), and what f returns beside."""

    def branch(
        x: jax.Array, norm: str, f: Callable[[jax.Array], tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any]:
        layer_norm = _layer_norm(c, norm)
        y, more = f(layer_norm(x) if c.normalize_before else x)
        x = x + nn.Dropout(c.dropout, deterministic=deterministic)(y)
        return (x if c.normalize_before else layer_norm(x)), more

    return branch


def _mlp(
    c: BartConfig, width: int, deterministic: bool
) -> Callable[[jax.Array], tuple[jax.Array, None]]:
    """[B, T, D] -> gelu [B, T, width] -> [B, T, D]."""

    def mlp(x: jax.Array) -> tuple[jax.Array, None]:
        h = nn.gelu(_dense(width, c, "fc1")(x), approximate=False)
        h = nn.Dropout(c.activation_dropout, deterministic=deterministic)(h)
        return _dense(c.d_model, c, "fc2")(h), None

    return mlp


def _left_out(block: Any, rate: float, before: jax.Array, after: jax.Array) -> jax.Array:
    """LayerDrop: a step leaves the block out at this rate, for all rows. arXiv:1909.11556."""
    if block.deterministic or not rate:
        return after
    return jnp.where(jax.random.bernoulli(block.make_rng("dropout"), rate), before, after)


def _dense(features: int, c: BartConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(c.init_std)
    return nn.Dense(features, dtype=c.dtype, kernel_init=init, name=name)


def _embed(rows: int, c: BartConfig, name: str | None = None) -> nn.Embed:
    init = nn.initializers.normal(c.init_std)
    return nn.Embed(rows, c.d_model, dtype=c.dtype, embedding_init=init, name=name)


def _layer_norm(c: BartConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name=name)
