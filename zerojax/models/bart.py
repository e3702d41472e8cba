"""BART and BlenderBot in flax linen: a single model, with a config for each.

The encoder, the decoder and the output share one token embedding table; learned positions, exact
GELU, biases everywhere. Sources: Lewis et al. 2019, BART (arXiv:1910.13461), Roller et al. 2020,
BlenderBot (arXiv:2004.13637), and Hugging Face, whose names the config and the modules have.

>>> model = Bart(BartConfig(**SIZES["blenderbot-tiny"]))
>>> source, target = jnp.ones((8, 16), jnp.int32), jnp.ones((8, 12), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, target)     # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, source, target, source > 0)
ShapeDtypeStruct(shape=(8, 12, 96), dtype=float32)

`zerojax.generate` generates targets. Shapes: B batch, S source, T target, D d_model, H heads,
d = D / H, V vocab_size, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import attend, check_length, run_blocks, split_heads
from zerojax.models.cache import attend_cached, remembered
from zerojax.models.config import Fields, ModelConfig, Sizes
from zerojax.models.encoder_decoder import EncoderDecoder
from zerojax.models.loss import widen

LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(ModelConfig):
    """Sizes and options of a BART by Hugging Face's names, or of a BlenderBot with `BLENDERBOT`."""

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
}


class Attention(nn.Module):
    """Attention of x [B, T, D] to itself, or to the memory [B, S, D] with `to_memory`.

    With `positions` int [B, T] keys and values are kept, see `zerojax.models.cache`.
    """

    config: BartConfig
    heads: int
    deterministic: bool
    to_memory: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None,
        mask: jax.Array | None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        c = self.config
        dropout = nn.Dropout(c.attention_dropout, deterministic=self.deterministic)

        def project(x: jax.Array, name: str) -> jax.Array:
            return split_heads(_dense(c.d_model, c, name)(x), self.heads)

        def keys_values() -> tuple[jax.Array, jax.Array, jax.Array | None]:
            source: Any = memory if self.to_memory else x
            return project(source, "k_proj"), project(source, "v_proj"), mask

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, **_: jax.Array) -> jax.Array:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k)
            return attend(scores, v, seen, dropout)

        q = project(x, "q_proj")
        if self.to_memory:
            k, v, seen = remembered(self, positions, keys_values)
            y = attention(q, k, v)
        else:
            k, v, seen = keys_values()
            y = attend_cached(self, attention, attention, q, k, v, positions)
        return _dense(c.d_model, c, "out_proj")(y.reshape(x.shape))


class EncoderBlock(nn.Module):
    """Attention to all of x [B, S, D], then an MLP. The second argument and result are `scan`'s."""

    config: BartConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None, mask: jax.Array | None) -> tuple[jax.Array, None]:
        c = self.config
        attention = Attention(c, c.encoder_attention_heads, self.deterministic, name="self_attn")
        branch = functools.partial(_branch, c, self.deterministic)
        x = branch(x, "self_attn_layer_norm", lambda x: attention(x, None, mask))
        return branch(x, "final_layer_norm", _mlp(c, c.encoder_ffn_dim, self.deterministic)), None


class DecoderBlock(nn.Module):
    """Attention to x [B, T, D], then to the memory [B, S, D], then an MLP."""

    config: BartConfig
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        _: None,
        mask: jax.Array | None,
        memory: jax.Array | None,
        memory_mask: jax.Array | None,
        positions: jax.Array | None,
    ) -> tuple[jax.Array, None]:
        c = self.config
        to_itself, to_memory = (
            Attention(c, c.decoder_attention_heads, self.deterministic, to_memory, name=name)
            for name, to_memory in (("self_attn", False), ("encoder_attn", True))
        )
        branch = functools.partial(_branch, c, self.deterministic)
        x = branch(x, "self_attn_layer_norm", lambda x: to_itself(x, None, mask, positions))
        x = branch(
            x, "encoder_attn_layer_norm", lambda x: to_memory(x, memory, memory_mask, positions)
        )
        return branch(x, "final_layer_norm", _mlp(c, c.decoder_ffn_dim, self.deterministic)), None


def _branch(
    c: BartConfig,
    deterministic: bool,
    x: jax.Array,
    norm: str,
    f: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Computes x + f(norm(x)) or norm(x + f(x))."""
    norm_layer = _layer_norm(c, norm)
    y = f(norm_layer(x) if c.normalize_before else x)
    x = x + nn.Dropout(c.dropout, deterministic=deterministic)(y)
    return x if c.normalize_before else norm_layer(x)


def _mlp(c: BartConfig, width: int, deterministic: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns an MLP [B, T, D] -> gelu [B, T, width] -> [B, T, D]."""

    def mlp(x: jax.Array) -> jax.Array:
        h = nn.gelu(_dense(width, c, "fc1")(x), approximate=False)
        h = nn.Dropout(c.activation_dropout, deterministic=deterministic)(h)
        return _dense(c.d_model, c, "fc2")(h)

    return mlp


class Stack(nn.Module):
    """All blocks of the encoder or the decoder, applied to embedded tokens [B, T, D]."""

    config: BartConfig
    block: type[nn.Module]
    layers: int

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, deterministic: bool, *inputs: object
    ) -> jax.Array:
        c = self.config
        rows = c.max_position_embeddings + c.position_offset
        x += _embed(rows, c, "embed_positions")(positions + c.position_offset)
        if c.normalize_embedding:
            x = _layer_norm(c, "layernorm_embedding")(x)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        x, _ = run_blocks(
            self.block, c, (deterministic,), x, *inputs, layers=range(self.layers), name="layers"
        )
        return _layer_norm(c, "layer_norm")(x) if c.add_final_layer_norm else x


class Bart(EncoderDecoder):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V]; `shifted` makes the targets."""

    config: BartConfig

    def setup(self) -> None:
        c = self.config
        self.shared: nn.Embed = _embed(c.vocab_size, c)
        self.encoder: Stack = Stack(c, EncoderBlock, c.encoder_layers)
        self.decoder: Stack = Stack(c, DecoderBlock, c.decoder_layers)
        if c.add_logits_bias:
            zeros = nn.initializers.zeros
            self.final_logits_bias: jax.Array = self.param(
                "final_logits_bias", zeros, (1, c.vocab_size)
            )

    def embedded(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        check_length(tokens, c, "max_position_embeddings")
        return self.shared(tokens) * (math.sqrt(c.d_model) if c.scale_embedding else 1)

    def logits(self, x: jax.Array) -> jax.Array:
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


def _dense(features: int, c: BartConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(c.init_std)
    return nn.Dense(features, dtype=c.dtype, kernel_init=init, name=name)


def _embed(rows: int, c: BartConfig, name: str | None = None) -> nn.Embed:
    init = nn.initializers.normal(c.init_std)
    return nn.Embed(rows, c.d_model, dtype=c.dtype, embedding_init=init, name=name)


def _layer_norm(c: BartConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name=name)
