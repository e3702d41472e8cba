"""BART and BlenderBot in flax linen: a single model, with a config for each.

The encoder, the decoder and the output share one token embedding table; learned positions, exact
GELU, biases everywhere. Sources: Lewis et al. 2019, BART (arXiv:1910.13461), Roller et al. 2020,
BlenderBot (arXiv:2004.13637), and Hugging Face, whose names the config and the modules have.

>>> model = Bart(BartConfig(**SIZES["blenderbot-tiny"]))
>>> source, target = jnp.ones((8, 16), jnp.int32), jnp.ones((8, 12), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, target)     # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, source, target, source > 0)
ShapeDtypeStruct(shape=(8, 12, 96), dtype=float32)

`zerojax.generate` generates targets. Shapes: B batch, S source, T target, D d_model, V vocab_size.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import check_length, dense, embed, run_blocks
from zerojax.models.config import Fields, Rate, Size, Sizes
from zerojax.models.encoder_decoder import Activation, Block, EncoderDecoder, EncoderDecoderConfig
from zerojax.models.loss import widen

LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """Sizes and options of a BART by Hugging Face's names, or of a BlenderBot with `BLENDERBOT`."""

    encoder_layers: Size
    decoder_layers: Size
    encoder_attention_heads: Size
    decoder_attention_heads: Size
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    max_position_embeddings: Size
    normalize_before: bool = False  # norms are at the start of each branch, not after the sum
    normalize_embedding: bool = True
    add_final_layer_norm: bool = False
    position_offset: int = 2  # unused rows at the start of the table of positions
    add_logits_bias: bool = False  # a bias that no gradient changes
    scale_embedding: bool = False  # multiplies token embeddings by sqrt(D)
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    activation_dropout: Rate = 0.0
    init_std: float = 0.02
    pad_token_id: int = 1
    eos_token_id: int = 2
    decoder_start_token_id: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads("d_model", "encoder_attention_heads")
        self.check_heads("d_model", "decoder_attention_heads")

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the type, which the other options decide."""
        return "blenderbot" if self.normalize_before else "bart"

    @property
    def norms_sums(self) -> bool:
        return not self.normalize_before

    def sizes(self, is_decoder: bool) -> tuple[int, int, int]:
        if is_decoder:
            heads, width = self.decoder_attention_heads, self.decoder_ffn_dim
        else:
            heads, width = self.encoder_attention_heads, self.encoder_ffn_dim
        return heads, self.d_model // heads, width

    def rates(self) -> tuple[float, float, float]:
        return self.dropout, self.attention_dropout, self.activation_dropout

    def mlp(self) -> tuple[Activation, tuple[str, ...], str]:
        return functools.partial(nn.gelu, approximate=False), ("fc1",), "fc2"

    def dense(self, features: int, name: str) -> nn.Dense:
        return dense(features, self, self.init_std, name)

    def norm(self, name: str) -> nn.Module:
        return nn.LayerNorm(LAYER_NORM_EPS, dtype=self.dtype, name=name)


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


class Stack(nn.Module):
    """All blocks of the encoder or the decoder, applied to embedded tokens [B, T, D]."""

    config: BartConfig
    layers: int
    is_decoder: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        deterministic: bool,
        mask: jax.Array | None,
        *inputs: object,
    ) -> jax.Array:
        c = self.config
        rows = c.max_position_embeddings + c.position_offset
        x += embed(rows, c.d_model, c, c.init_std, "embed_positions")(positions + c.position_offset)
        if c.normalize_embedding:
            x = c.norm("layernorm_embedding")(x)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        x, _ = run_blocks(
            Block, c, (deterministic, self.is_decoder), x, mask, None, *inputs,
            layers=range(self.layers), name="layers",
        )  # fmt: skip
        return c.norm("layer_norm")(x) if c.add_final_layer_norm else x


class Bart(EncoderDecoder):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V]; `shifted` makes the targets."""

    config: BartConfig

    def setup(self) -> None:
        c = self.config
        self.shared: nn.Embed = embed(c.vocab_size, c.d_model, c, c.init_std)
        self.encoder: Stack = Stack(c, c.encoder_layers, is_decoder=False)
        self.decoder: Stack = Stack(c, c.decoder_layers, is_decoder=True)
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
