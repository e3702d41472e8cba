"""DeBERTa v2 and v3 in flax linen, with a sequence classification head.

Attention is disentangled: a token's content and its distance to another token have separate
vectors, and scores sum content to content, content to position (c2p) and position to content (p2c).
Distances fall into buckets of logarithmic width. Post-LayerNorm blocks, exact GELU, biases
everywhere; v2's large models add a convolution parallel to the first block. Source: He et al. 2021,
DeBERTa (arXiv:2006.03654), and Hugging Face's `deberta-v2`, whose names config and modules have.

>>> config = DebertaConfig(**SIZES["deberta-tiny"])
>>> model, tokens = DebertaClassifier(config), jnp.zeros((8, 16), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens)            # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, tokens, tokens > 0)              # logits of two classes
ShapeDtypeStruct(shape=(8, 2), dtype=float32)

Shapes: B batch, T time, D hidden_size, H num_attention_heads, d = D / H, C num_labels,
S the span of distances.
"""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from zerojax.models.blocks import attend, keys_mask, run_blocks, split_heads
from zerojax.models.config import Sizes, one_of
from zerojax.models.encoder import (
    ACTIVATIONS,
    Block,
    Body,
    DenseGelu,
    Encoder,
    EncoderConfig,
    dense,
    embed,
    hidden_dropout,
    layer_norm,
    masked,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebertaConfig(EncoderConfig):
    """Sizes and options of a DeBERTa, by Hugging Face's names.

    With a convolution, `scan` leaves the first block unstacked.
    """

    model_type: str = "deberta-v2"
    max_relative_positions: int = -1  # below 1: max_position_embeddings
    position_buckets: int = 256  # below 1: a bucket for each distance
    pos_att_type: Annotated[
        tuple[str, ...], one_of((), ("c2p",), ("p2c",), ("c2p", "p2c"), ("p2c", "c2p"))
    ] = ("c2p", "p2c")  # empty: no relative positions
    share_att_key: bool = True  # positions use the content's projections
    norm_rel_ebd: Annotated[str, one_of("layer_norm", "none")] = "layer_norm"
    position_biased_input: bool = False  # adds absolute positions
    conv_kernel_size: int = 0
    conv_act: Annotated[str, one_of("gelu", "tanh")] = "gelu"
    layer_norm_eps: float = 1e-7

    zeros_padding = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_kernel_size and self.conv_kernel_size % 2 == 0:
            self.reject("conv_kernel_size", "be odd, or 0 for no convolution")

    @property
    def adds_positions(self) -> bool:
        return self.position_biased_input

    @property
    def span(self) -> int:
        """Span S: the table of 2 S positions has a row for each distance from -S to S - 1."""
        return self.position_buckets if self.position_buckets > 0 else self.farthest

    @property
    def farthest(self) -> int:
        """Distance at which the last bucket ends."""
        if self.max_relative_positions > 0:
            return self.max_relative_positions
        return self.max_position_embeddings


# Numbers of parameters with two classes; Hugging Face's `microsoft/deberta-v2-xlarge` (He et al.
# report 900M) has 884,593,152 without the head.
SIZES: Sizes = {
    "deberta-tiny": dict(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, position_buckets=8, conv_kernel_size=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "deberta-mini": dict(
        vocab_size=1024, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=256, max_position_embeddings=128, position_buckets=32, conv_kernel_size=3,
        type_vocab_size=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.05,
    ),
    "deberta-v2-xlarge": dict(
        vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24,
        intermediate_size=6144, conv_kernel_size=3,
    ),  # 886,957,058
}  # fmt: skip


def bucket_of(distances: np.ndarray, buckets: int, farthest: int) -> np.ndarray:
    """Maps distances to buckets of the same sign: exact up to buckets / 2, then logarithmic.

    With m = buckets / 2, |x| > m becomes m + ceil((m - 1) log(|x| / m) / log((farthest - 1) / m)).
    The computation is in fp32, because its rounding determines the borders of the buckets.

    >>> bucket_of(np.array([-2, 4, 5, 8, 16, 31]), buckets=8, farthest=32)
    array([-2,  4,  5,  6,  7,  7])
    """
    half = buckets // 2
    ratio = np.maximum(np.abs(distances), half).astype(np.float32) / np.float32(half)
    log_range = np.log(np.float32((farthest - 1) / half))
    logarithmic = np.ceil(np.log(ratio) / log_range * np.float32(half - 1)) + half
    is_exact = np.abs(distances) <= half
    return np.where(is_exact, distances, np.sign(distances) * logarithmic).astype(np.int64)


def rows_by_distance(config: DebertaConfig, tokens: int) -> np.ndarray:
    """Returns the table's rows, int [2 T - 1], for distances T - 1, T - 2, ..., 1 - T."""
    distances = np.arange(tokens - 1, -tokens, -1)
    if config.position_buckets > 0:
        distances = bucket_of(distances, config.position_buckets, config.farthest)
    return np.clip(distances + config.span, 0, 2 * config.span - 1)


def by_pairs(scores: jax.Array) -> jax.Array:
    """Converts scores by distance [..., T, 2 T - 1] to [..., T, T]: (i, j) is (i, T - 1 - i + j).

    Padding each row by one element, and reading the flattened array with the unpadded row length,
    shifts each row by one relative to the row before, so that no gather is needed.

    >>> by_pairs(jnp.tile(jnp.arange(2, -3, -1), (3, 1)))                        # i - j
    Array([[ 0, -1, -2],
           [ 1,  0, -1],
           [ 2,  1,  0]], dtype=int32)
    """
    *batch, tokens, distances = scores.shape
    padded = jnp.pad(scores, [(0, 0)] * len(batch) + [(0, 0), (0, 1)])
    flat = padded.reshape(*batch, -1)[..., tokens - 1 : tokens - 1 + tokens * distances]
    return flat.reshape(*batch, tokens, distances)[..., :tokens]


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D]: softmax((q k + q p_k + p_q k) / sqrt(3 d)) v.

    p_k and p_q are keys and queries of the table of positions [2 S, D], read at the distance of the
    two tokens. Each term that `pos_att_type` omits reduces the 3 under the root by 1.
    """

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, table: jax.Array | None) -> jax.Array:
        c = self.config
        scale = 1 / math.sqrt(c.hidden_size // c.num_attention_heads * (1 + len(c.pos_att_type)))
        query, key, value = (
            dense(c.hidden_size, c, f"{name}_proj") for name in ("query", "key", "value")
        )
        q, k, v = (split_heads(layer(x), c.num_attention_heads) for layer in (query, key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k)

        if table is not None:
            # Only the rows for these distances are projected.
            rows, row_indices = np.unique(rows_by_distance(c, x.shape[1]), return_inverse=True)
            table = hidden_dropout(c, self.deterministic)(table)[rows[0] : rows[-1] + 1]

            def positions(shared: nn.Dense, name: str) -> jax.Array:
                layer = shared if c.share_att_key else dense(c.hidden_size, c, name)
                return split_heads(layer(table), c.num_attention_heads)[row_indices]

            if "c2p" in c.pos_att_type:
                p_k = positions(key, "pos_key_proj")
                scores += by_pairs(jnp.einsum("bqhd,phd->bhqp", q * scale, p_k))
            if "p2c" in c.pos_att_type:
                p_q = positions(query, "pos_query_proj")[::-1]
                by_key = by_pairs(jnp.einsum("bkhd,phd->bhkp", k, p_q * scale))
                scores += by_key.swapaxes(-1, -2)

        dropout = nn.Dropout(c.attention_probs_dropout_prob, deterministic=self.deterministic)
        return attend(scores, v, mask, dropout).reshape(x.shape)


class Conv(nn.Module):
    """norm(y + act(conv(x))) for the first block's input and output [B, T, D]."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array, mask: jax.Array | None) -> jax.Array:
        c, size = self.config, (self.config.conv_kernel_size,)
        init = nn.initializers.normal(c.initializer_range)
        conv = nn.Conv(c.hidden_size, size, dtype=c.dtype, kernel_init=init, name="conv")
        convolved = hidden_dropout(c, self.deterministic)(masked(conv(x), mask))
        return masked(layer_norm(c)(y + ACTIVATIONS[c.conv_act](convolved)), mask)


class Blocks(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        c, fields, table = self.config, (self.deterministic, SelfAttention), None
        if c.pos_att_type:
            table = embed(2 * c.span, c, "rel_embeddings").embedding
            if c.norm_rel_ebd == "layer_norm":
                table = layer_norm(c)(table)
        keys = keys_mask(mask)

        def run(x: jax.Array, c: DebertaConfig, layers: range) -> jax.Array:
            return run_blocks(Block, c, fields, x, keys, table, layers=layers, name="layer")[0]

        layers = range(c.num_hidden_layers)
        if c.conv_kernel_size:
            y = run(x, dataclasses.replace(c, scan=False), layers[:1])
            x, layers = Conv(c, self.deterministic, name="conv")(x, y, mask), layers[1:]
        return run(x, c, layers) if layers else x


class Deberta(Body):
    """Tokens int [B, T] -> [B, T, D]; arguments as for `DebertaClassifier`."""

    blocks = Blocks


class DebertaClassifier(Encoder):
    """Tokens int [B, T] -> logits [B, C], from the first token's features."""

    config: DebertaConfig

    body = Deberta

    @nn.nowrap
    def head(self, x: jax.Array, body: Body, deterministic: bool) -> jax.Array:
        c = self.config
        x = DenseGelu(c, c.hidden_size, name="pooler")(x[:, 0])
        return dense(c.num_labels, c, "classifier")(hidden_dropout(c, deterministic)(x))
