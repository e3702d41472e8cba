"""Whisper in flax linen: BART's decoder, and an encoder of log-mel spectrograms.

Two convolutions, the second with stride 2, embed the spectrogram; the encoder's positions are
sinusoids, which no gradient changes. Pre-LayerNorm blocks, exact GELU, no bias in attention's
projection of keys. Sources: Radford et al. 2022, Whisper (arXiv:2212.04356), and Hugging Face,
whose names the config and the modules have.

>>> model = Whisper(WhisperConfig(**SIZES["whisper-mini"]))
>>> sound, target = jnp.ones((8, 8, 32)), jnp.ones((8, 12), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), sound, target)     # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, sound, target)
ShapeDtypeStruct(shape=(8, 12, 96), dtype=float32)

`zerojax.generation.beam_search.generate` generates targets from sound in place of `input_ids`.
Shapes: B batch, M num_mel_bins, S max_source_positions, T target, D d_model, V vocab_size.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from zerojax.models.bart import LAYER_NORM_EPS, Bart, BartConfig, EncoderBlock
from zerojax.models.blocks import run_blocks
from zerojax.models.config import Fields, Sizes

OPTIONS: Fields = dict(
    normalize_before=True, normalize_embedding=False, add_final_layer_norm=True, position_offset=0,
    add_logits_bias=False, scale_embedding=False,
)  # fmt: skip
"""Options of a `BartConfig` that every Whisper has."""

TIMESCALES = 10_000.0  # the ratio of the longest to the shortest wavelength of the sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperConfig(BartConfig):
    """Sizes and options of a Whisper, by Hugging Face's names.

    `max_position_embeddings` is `max_target_positions` there. `OPTIONS` has the values of the
    inherited options that distinguish the models.
    """

    has_key_bias: ClassVar[bool] = False

    num_mel_bins: int = 80
    max_source_positions: int = 1500  # S, half as many as the spectrogram has
    max_position_embeddings: int = 448
    normalize_before: bool = True
    normalize_embedding: bool = False
    add_final_layer_norm: bool = True
    position_offset: int = 0
    dropout: float = 0.0
    pad_token_id: int = 50257  # ids of the multilingual vocabulary
    eos_token_id: int = 50257
    decoder_start_token_id: int = 50258

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("num_mel_bins", "max_source_positions")
        if self.d_model % 2 or self.d_model < 4:
            self.reject("d_model", "be even and at least 4")
        for name, value in OPTIONS.items():
            self.check_one_of(name, value)


def _size(layers: int, heads: int, width: int, **other: int) -> Fields:
    return dict(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        vocab_size=51865,
    ) | other  # fmt: skip


# Numbers of parameters of Hugging Face's `openai/whisper-tiny` and so on.
SIZES: Sizes = {
    "whisper-mini": _size(
        2, 4, 32, vocab_size=96, num_mel_bins=8, max_source_positions=16,
        max_position_embeddings=24, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1,
    ),
    "whisper-tiny": _size(4, 6, 384),  # 37,760,640
    "whisper-small": _size(12, 12, 768),  # 241,734,912
    "whisper-large-v3": _size(32, 20, 1280, vocab_size=51866, num_mel_bins=128),  # 1,543,490,560
}  # fmt: skip


class Encoder(nn.Module):
    """Spectrograms [B, M, 2 S] -> [B, S, D]."""

    config: WhisperConfig

    @nn.compact
    def __call__(self, input_features: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        _check_features(input_features, c)
        table = nn.Embed(
            c.max_source_positions, c.d_model, dtype=c.dtype, embedding_init=sinusoids,
            name="embed_positions",
        )  # fmt: skip
        positions = jax.lax.stop_gradient(table(jnp.arange(c.max_source_positions)))
        x = input_features.swapaxes(1, 2).astype(positions.dtype)
        for name, stride in (("conv1", 1), ("conv2", 2)):
            init = nn.initializers.normal(c.init_std)
            convolution = nn.Conv(
                c.d_model, (3,), stride, padding=1, dtype=c.dtype, kernel_init=init, name=name
            )
            x = nn.gelu(convolution(x), approximate=False)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x + positions)
        x, _ = run_blocks(
            EncoderBlock, (c, deterministic), x, None,
            layers=range(c.encoder_layers), name="layers", scan=c.scan, remat=c.remat,
        )  # fmt: skip
        return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name="layer_norm")(x)


class Whisper(Bart):
    """Spectrograms [B, M, 2 S] and target int [B, T] -> logits [B, T, V] in fp32 or wider.

    As `Bart`, but a spectrogram has no padding: as in transformers, `attention_mask` has no effect.
    """

    config: WhisperConfig

    @nn.nowrap
    def new_encoder(self) -> nn.Module:
        """Returns the encoder's module."""
        return Encoder(self.config)

    def __call__(
        self,
        input_features: jax.Array,
        decoder_input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
        deterministic: bool = True,
        targets: jax.Array | None = None,
    ) -> jax.Array:
        inputs = (input_features, decoder_input_ids, None, decoder_attention_mask)
        return super().__call__(*inputs, deterministic, targets)

    def encode(
        self,
        input_features: jax.Array,
        attention_mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Encodes spectrograms [B, M, 2 S] as a memory [B, S, D]."""
        return self.encoder(input_features, deterministic)


def sinusoids(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """Returns sines and cosines [S, D] of the positions, half of the features each.

    An initializer of flax; the key has no effect.
    """
    positions, features = shape
    exponents = np.arange(features // 2) / (features // 2 - 1)
    angles = np.arange(positions)[:, None] * np.exp(-math.log(TIMESCALES) * exponents)
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), dtype)


def _check_features(input_features: jax.Array, c: WhisperConfig) -> None:
    wanted = (c.num_mel_bins, 2 * c.max_source_positions)
    if input_features.shape[1:] != wanted:
        raise ValueError(
            f"input_features are {[*input_features.shape]}, but num_mel_bins and "
            f"max_source_positions of the config need {['B', *wanted]}: pad or cut the sound"
        )
