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

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import attend, check_length, run_blocks, split_heads
from zerojax.models.config import Fields, ModelConfig, Sizes
from zerojax.models.loss import cross_entropy, widen
from zerojax.xla.types import PyTree

LAYER_NORM_EPS = 1e-5

KeysValues = tuple[jax.Array, jax.Array]  # [B, S, H, d] each
Cache = KeysValues | tuple[KeysValues, ...]
"""Keys and values of all blocks: stacked, [L, B, S, H, d] each, or a pair for each block."""

Extra = TypeVar("Extra")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(ModelConfig):
    """Sizes and options of a BART by Hugging Face's names, or of a BlenderBot with `BLENDERBOT`."""

    has_key_bias: ClassVar[bool] = True  # of attention's projection of keys

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    max_position_embeddings: int
    normalize_before: bool = False  # norms are at the start of each branch, not after the sum
    normalize_embedding: bool = True
    add_final_layer_norm: bool = False
    position_offset: int = 2  # unused rows at the start of the table of positions
    add_logits_bias: bool = False  # a bias that no gradient changes
    scale_embedding: bool = False  # multiplies token embeddings by sqrt(D)
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    encoder_layerdrop: float = 0.0  # the probability that a block is skipped
    decoder_layerdrop: float = 0.0
    init_std: float = 0.02
    pad_token_id: int = 1
    eos_token_id: int = 2
    decoder_start_token_id: int = 2

    def __post_init__(self) -> None:
        self.check_sizes(
            *("vocab_size", "d_model", "encoder_layers", "decoder_layers"),
            *("encoder_attention_heads", "decoder_attention_heads"),
            *("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"),
        )
        self.check_heads("d_model", "encoder_attention_heads")
        self.check_heads("d_model", "decoder_attention_heads")
        self.check_rates("dropout", "attention_dropout", "activation_dropout")
        self.check_rates("encoder_layerdrop", "decoder_layerdrop")


BLENDERBOT: Fields = dict(
    normalize_before=True, normalize_embedding=False, add_final_layer_norm=True, position_offset=0,
    scale_embedding=True, pad_token_id=0, decoder_start_token_id=1,
)  # fmt: skip


def _size(layers: tuple[int, int], heads: int, width: int, **other: float) -> Fields:
    return dict(
        encoder_layers=layers[0], decoder_layers=layers[1], d_model=width,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
    ) | other  # fmt: skip


# Numbers of parameters; the second config is Hugging Face's `facebook/blenderbot-400M-distill`.
SIZES: Sizes = {
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

        def project(x: jax.Array, name: str, use_bias: bool = True) -> jax.Array:
            return split_heads(_dense(c.d_model, c, name, use_bias)(x), self.heads)

        q = project(x, "q_proj")
        if source is None:
            assert cached is not None
            k, v = cached
        else:
            k, v = project(source, "k_proj", c.has_key_bias), project(source, "v_proj")
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
        c, block_input = self.config, x
        attention = Attention(c, c.encoder_attention_heads, self.deterministic, name="self_attn")
        branch = functools.partial(_branch, c, self.deterministic)
        x = branch(x, "self_attn_layer_norm", lambda x: attention(x, x, mask))[0]
        x = branch(x, "final_layer_norm", _mlp(c, c.encoder_ffn_dim, self.deterministic))[0]
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
    ) -> tuple[jax.Array, tuple[KeysValues, KeysValues] | None]:
        c, block_input, (cached, memorized) = self.config, x, cache or (None, None)
        to_itself, to_memory = (
            Attention(c, c.decoder_attention_heads, self.deterministic, name=name)
            for name in ("self_attn", "encoder_attn")
        )
        branch = functools.partial(_branch, c, self.deterministic)
        x, own_keys = branch(
            x, "self_attn_layer_norm", lambda x: to_itself(x, x, mask, cached, position)
        )
        x, memory_keys = branch(
            x, "encoder_attn_layer_norm", lambda x: to_memory(x, memory, memory_mask, memorized)
        )
        x = branch(x, "final_layer_norm", _mlp(c, c.decoder_ffn_dim, self.deterministic))[0]
        x = _layer_drop(self, c.decoder_layerdrop, block_input, x)
        return x, None if cache is None else (own_keys, memory_keys)


def _branch(
    c: BartConfig,
    deterministic: bool,
    x: jax.Array,
    norm: str,
    f: Callable[[jax.Array], tuple[jax.Array, Extra]],
) -> tuple[jax.Array, Extra]:
    """Computes x + f(norm(x)) or norm(x + f(x)); returns also the second result of f."""
    norm_layer = _layer_norm(c, norm)
    y, extra = f(norm_layer(x) if c.normalize_before else x)
    x = x + nn.Dropout(c.dropout, deterministic=deterministic)(y)
    return (x if c.normalize_before else norm_layer(x)), extra


def _mlp(
    c: BartConfig, width: int, deterministic: bool
) -> Callable[[jax.Array], tuple[jax.Array, None]]:
    """Returns an MLP [B, T, D] -> gelu [B, T, width] -> [B, T, D]."""

    def mlp(x: jax.Array) -> tuple[jax.Array, None]:
        h = nn.gelu(_dense(width, c, "fc1")(x), approximate=False)
        h = nn.Dropout(c.activation_dropout, deterministic=deterministic)(h)
        return _dense(c.d_model, c, "fc2")(h), None

    return mlp


def _layer_drop(
    block: EncoderBlock | DecoderBlock, rate: float, before: jax.Array, after: jax.Array
) -> jax.Array:
    """Applies LayerDrop: skips the block at this rate, for all rows at once. arXiv:1909.11556."""
    if block.deterministic or not rate:
        return after
    return jnp.where(jax.random.bernoulli(block.make_rng("dropout"), rate), before, after)


class Stack(nn.Module):
    """All blocks of the encoder or the decoder, applied to embedded tokens [B, T, D]."""

    config: BartConfig
    block: type[nn.Module]
    layers: int

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        deterministic: bool,
        *inputs: object,
        cache: PyTree = None,
    ) -> tuple[jax.Array, PyTree]:
        c = self.config
        rows = c.max_position_embeddings + c.position_offset
        x += _embed(rows, c, "embed_positions")(positions + c.position_offset)
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

    Logits at t predict the token after `decoder_input_ids[:, t]`; `shifted` computes these inputs
    from labels. Masks [B, S] and [B, T] are 0 or False on padding. With targets int [B, T] the
    result is each one's cross-entropy, [B, T]. `deterministic=False` needs `rngs={"dropout": key}`.
    """

    config: BartConfig

    def setup(self) -> None:
        c = self.config
        self.shared: nn.Embed = _embed(c.vocab_size, c)
        self.encoder: nn.Module = self.new_encoder()
        self.decoder: Stack = Stack(c, DecoderBlock, c.decoder_layers)
        if c.add_logits_bias:
            zeros = nn.initializers.zeros
            self.final_logits_bias: jax.Array = self.param(
                "final_logits_bias", zeros, (1, c.vocab_size)
            )

    @nn.nowrap
    def new_encoder(self) -> nn.Module:
        """Returns the encoder's module; `encode` calls it."""
        return Stack(self.config, EncoderBlock, self.config.encoder_layers)

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
        cache: Cache,
        memorized: Cache | None = None,
        memory: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, Cache]:
        """Returns logits [B, V] after the tokens [B] at this position, `cache` and `memorized`.

        `cache` has the keys and values of the positions before, from `empty_cache` or the previous
        call; `memorized` has those of the memory. The first call takes the memory [B, S, D] and
        returns `memorized` for the next calls. `attention_mask` [B, S] is the source's.
        """
        scan, length = self.config.scan, jax.tree.leaves(cache)[0].shape[-3]
        caches: PyTree = (cache, memorized)
        if not scan:
            caches = [*zip(cache, memorized or [None] * len(cache), strict=True)]
        x, caches = self.decoder(
            self._embedded(tokens[:, None]), jnp.asarray(position)[None], True,
            memory, jnp.arange(length) <= position, _keys(attention_mask), position, cache=caches,
        )  # fmt: skip
        cache, memorized = caches if scan else zip(*caches, strict=True)
        return self._logits(x)[:, 0], cache, memorized

    def empty_cache(self, rows: int, length: int) -> Cache:
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
        check_length(tokens, c, "max_position_embeddings")
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


def _dense(features: int, c: BartConfig, name: str, use_bias: bool = True) -> nn.Dense:
    init = nn.initializers.normal(c.init_std)
    return nn.Dense(features, use_bias, dtype=c.dtype, kernel_init=init, name=name)


def _embed(rows: int, c: BartConfig, name: str | None = None) -> nn.Embed:
    init = nn.initializers.normal(c.init_std)
    return nn.Embed(rows, c.d_model, dtype=c.dtype, embedding_init=init, name=name)


def _layer_norm(c: BartConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name=name)
