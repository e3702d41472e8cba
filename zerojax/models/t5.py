"""T5 in flax linen: T5, T5 1.1 and Flan-T5, an encoder and a decoder with relative positions.

Pre-RMSNorm blocks without biases; scores are not scaled, and a table of buckets adds a number for
each head and distance, the same in all blocks of a stack. Sources: Raffel et al. 2019, T5
(arXiv:1910.10683), Shazeer 2020, GLU variants (arXiv:2002.05202), and Hugging Face, whose names the
config and the layers have.

>>> model = T5(T5Config(**SIZES["t5-tiny"]))
>>> source, target = jnp.ones((8, 16), jnp.int32), jnp.ones((8, 12), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), source, target)     # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, source, target, source > 0)
ShapeDtypeStruct(shape=(8, 12, 96), dtype=float32)

`zerojax.generate` generates targets. Shapes: B batch, S source, T target, K keys, D d_model,
H num_heads, V vocab_size.
"""

import dataclasses
import functools
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from zerojax.models.blocks import dense, embed, run_blocks
from zerojax.models.config import Flag, Positive, Rate, Size, Sizes, one_of
from zerojax.models.encoder_decoder import Activation, Block, EncoderDecoder, EncoderDecoderConfig
from zerojax.models.loss import widen

GATED = "gated-gelu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """Sizes and options of a T5, by Hugging Face's names."""

    branches = ("self_attention", "cross_attention", "mlp")
    projections = ("q", "k", "v", "o")
    scales_scores = False
    norms_inside = True

    d_kv: Size  # features of a head
    d_ff: Size
    num_layers: Size  # of the encoder
    num_decoder_layers: Size
    num_heads: Size
    relative_attention_num_buckets: Size = 32
    relative_attention_max_distance: Size = 128
    dropout_rate: Rate = 0.1
    layer_norm_epsilon: Positive = 1e-6
    initializer_factor: Positive = 1.0
    feed_forward_proj: Annotated[str, one_of("relu", GATED)] = "relu"
    tie_word_embeddings: Flag = True  # the table of tokens computes the logits
    scale_decoder_outputs: Flag = True  # multiplies the decoder's output by D ** -0.5
    pad_token_id: int | None = 0
    eos_token_id: int | None = 1
    decoder_start_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        n, farthest = "relative_attention_num_buckets", self.relative_attention_max_distance
        if not 2 <= self.relative_attention_num_buckets // 2 < farthest:
            self.reject(
                n, f"be from 4 to 2 * relative_attention_max_distance - 1 = {2 * farthest - 1}"
            )

    def sizes(self, is_decoder: bool) -> tuple[int, int, int]:
        return self.num_heads, self.d_kv, self.d_ff

    def rates(self) -> tuple[float, float, float]:
        return self.dropout_rate, self.dropout_rate, self.dropout_rate

    def mlp(self) -> tuple[Activation, tuple[str, ...], str]:
        if self.feed_forward_proj == GATED:
            return functools.partial(nn.gelu, approximate=True), ("wi_0", "wi_1"), "wo"
        return nn.relu, ("wi",), "wo"

    def dense(self, features: int, name: str) -> nn.Dense:
        inputs = {"q": self.d_model * self.d_kv, "o": self.num_heads * self.d_kv, "wo": self.d_ff}
        std = self.initializer_factor * inputs.get(name, self.d_model) ** -0.5
        return dense(features, self, std, name, use_bias=False)

    def norm(self, name: str) -> nn.Module:
        scale = nn.initializers.constant(self.initializer_factor)
        return nn.RMSNorm(self.layer_norm_epsilon, dtype=self.dtype, scale_init=scale, name=name)


SIZES: Sizes = {
    "t5-tiny": dict(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0,
    ),
    "t5-small": dict(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_decoder_layers=6,
        num_heads=8,
    ),
}  # fmt: skip


class Stack(nn.Module):
    """All blocks of the encoder or the decoder, applied to embedded tokens [B, T, D]."""

    config: T5Config
    layers: int
    is_decoder: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        deterministic: bool,
        mask: jax.Array | None,
        *inputs: jax.Array | None,
    ) -> jax.Array:
        c = self.config
        bias = self._bias(positions, x.shape[1] if mask is None else mask.shape[-1])
        x = nn.Dropout(c.dropout_rate, deterministic=deterministic)(x)
        x, _ = run_blocks(
            Block, c, (deterministic, self.is_decoder), x, mask, bias, *inputs,
            layers=range(self.layers), name="block",
        )  # fmt: skip
        x = c.norm("final_layer_norm")(x)
        return nn.Dropout(c.dropout_rate, deterministic=deterministic)(x)

    @nn.nowrap
    def _bias(self, positions: jax.Array, keys: int) -> jax.Array:
        """Computes the bias of all blocks from one row of the table a distance.

        It is [H, T, K] for positions [T], and [B, H, T, K] for [B, T].
        """
        c = self.config
        count, std = c.relative_attention_num_buckets, c.initializer_factor * c.d_model**-0.5
        table = embed(count, c.num_heads, c, std, "relative_attention_bias")
        rows = buckets(np.arange(1 - keys, keys), c, is_decoder=self.is_decoder)
        distances = jnp.arange(keys) - positions[..., None] + keys - 1
        return jnp.moveaxis(table(jnp.asarray(rows))[distances], -1, -3)


class T5(EncoderDecoder):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V] in fp32 or wider."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        self.shared: nn.Embed = embed(c.vocab_size, c.d_model, c, c.initializer_factor)
        self.encoder: Stack = Stack(c, c.num_layers, is_decoder=False)
        self.decoder: Stack = Stack(c, c.num_decoder_layers, is_decoder=True)
        if not c.tie_word_embeddings:
            std = c.initializer_factor
            self.lm_head: nn.Dense = dense(c.vocab_size, c, std, use_bias=False)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        return self.shared(tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        c = self.config
        if c.scale_decoder_outputs:
            x *= c.d_model**-0.5
        return widen(self.shared.attend(x) if c.tie_word_embeddings else self.lm_head(x))


def buckets(distances: np.ndarray, c: T5Config, *, is_decoder: bool) -> np.ndarray:
    """Returns the bucket of each distance from a query to a key, of the same shape.

    Half of a direction's buckets are for one distance each, the others for logarithmic ranges up to
    `relative_attention_max_distance`. The encoder has buckets for both directions; in the decoder
    all later keys share the bucket 0.

    >>> config = T5Config(**SIZES["t5-tiny"])
    >>> buckets(np.array([-200, -9, -1, 0, 1, 9]), config, is_decoder=False).tolist()
    [15, 8, 1, 0, 17, 24]
    >>> buckets(np.array([-200, -9, -1, 0, 1, 9]), config, is_decoder=True).tolist()
    [31, 9, 1, 0, 0, 0]
    """
    count = c.relative_attention_num_buckets // (1 if is_decoder else 2)
    offset = np.where((distances > 0) & (not is_decoder), count, 0)
    distances = np.maximum(-distances, 0) if is_decoder else np.abs(distances)
    exact = count // 2
    # transformers computes in fp32, in this order: some quotients are integers but for rounding.
    logarithm = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
    span = np.float32(math.log(c.relative_attention_max_distance / exact))
    far = exact + (logarithm / span * np.float32(count - exact)).astype(int)
    return np.where(distances < exact, distances, np.minimum(far, count - 1)) + offset
