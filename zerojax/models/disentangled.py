"""DeBERTa's disentangled attention, with separate vectors for content and distance of tokens.

Source: He et al. 2021 (arXiv:2006.03654), with the distance buckets of DeBERTa v2.

Shapes: B batch, T time, D hidden_size, H num_attention_heads, d = D / H, S the span of distances.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from zerojax.models.deberta_config import DebertaConfig
from zerojax.models.layers import attend, split_heads


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


def hidden_dropout(c: DebertaConfig, deterministic: bool) -> nn.Dropout:
    return nn.Dropout(c.hidden_dropout_prob, deterministic=deterministic)


def dense(features: int, c: DebertaConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(c.initializer_range)
    return nn.Dense(features, dtype=c.dtype, kernel_init=init, name=name)
