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
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from zerojax.models.blocks import attend, run_blocks, split_heads
from zerojax.models.cache import attend_cached, remembered
from zerojax.models.config import ModelConfig, Sizes
from zerojax.models.encoder_decoder import EncoderDecoder
from zerojax.models.loss import widen

GATED = "gated-gelu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """Sizes and options of a T5, by Hugging Face's names."""

    vocab_size: int
    d_model: int
    d_kv: int  # features of a head
    d_ff: int
    num_layers: int  # of the encoder
    num_decoder_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True  # the table of tokens computes the logits
    scale_decoder_outputs: bool = True  # multiplies the decoder's output by D ** -0.5
    pad_token_id: int | None = 0
    eos_token_id: int | None = 1
    decoder_start_token_id: int | None = 0

    def __post_init__(self) -> None:
        self.check_sizes(
            *("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers"),
            *("num_heads", "relative_attention_num_buckets", "relative_attention_max_distance"),
        )
        self.check_rates("dropout_rate")
        self.check_positive("layer_norm_epsilon", "initializer_factor")
        self.check_one_of("feed_forward_proj", "relu", GATED)
        self.check_flags("tie_word_embeddings", "scale_decoder_outputs")
        n, farthest = "relative_attention_num_buckets", self.relative_attention_max_distance
        if not 2 <= self.relative_attention_num_buckets // 2 < farthest:
            self.reject(
                n, f"be from 4 to 2 * relative_attention_max_distance - 1 = {2 * farthest - 1}"
            )


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


class Attention(nn.Module):
    """x + attention of norm(x) [B, T, D] to itself, or to the memory [B, K, D] with `to_memory`.

    `bias` [H, T, K] or [B, H, T, K] is added to the scores. With `positions` int [B, T] keys and
    values are kept, see `zerojax.models.cache`.
    """

    config: T5Config
    deterministic: bool
    to_memory: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None,
        mask: jax.Array | None,
        bias: jax.Array | None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        c = self.config
        h = norm(c, "layer_norm")(x)

        def project(x: jax.Array, name: str, fan_in: int) -> jax.Array:
            return split_heads(_dense(c.num_heads * c.d_kv, fan_in, c, name)(x), c.num_heads)

        def keys_values() -> tuple[jax.Array, jax.Array, jax.Array | None]:
            source: Any = memory if self.to_memory else h
            return project(source, "k", c.d_model), project(source, "v", c.d_model), mask

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, **_: jax.Array) -> jax.Array:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            if bias is not None:
                scores += bias
            return attend(scores, v, seen, _dropout(c, self.deterministic))

        q = project(h, "q", c.d_model * c.d_kv)
        if self.to_memory:
            k, v, seen = remembered(self, positions, keys_values)
            y = attention(q, k, v)
        else:
            k, v, seen = keys_values()
            y = attend_cached(self, attention, attention, q, k, v, positions)
        y = y.reshape(*x.shape[:-1], c.num_heads * c.d_kv)
        y = _dense(c.d_model, c.num_heads * c.d_kv, c, "o")(y)
        return x + _dropout(c, self.deterministic)(y)


class Mlp(nn.Module):
    """x + mlp(norm(x)) [B, T, D]; the activation is ReLU, or tanh GELU with a gate."""

    config: T5Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        h = norm(c, "layer_norm")(x)
        if c.feed_forward_proj == GATED:
            gate = nn.gelu(_dense(c.d_ff, c.d_model, c, "wi_0")(h), approximate=True)
            h = gate * _dense(c.d_ff, c.d_model, c, "wi_1")(h)
        else:
            h = nn.relu(_dense(c.d_ff, c.d_model, c, "wi")(h))
        h = _dense(c.d_model, c.d_ff, c, "wo")(_dropout(c, self.deterministic)(h))
        return x + _dropout(c, self.deterministic)(h)


class EncoderBlock(nn.Module):
    """Attention to all of x [B, S, D], then an MLP. The second argument and result are `scan`'s."""

    config: T5Config
    deterministic: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, _: None, mask: jax.Array | None, bias: jax.Array
    ) -> tuple[jax.Array, None]:
        fields = (self.config, self.deterministic)
        x = Attention(*fields, name="self_attention")(x, None, mask, bias)
        return Mlp(*fields, name="mlp")(x), None


class DecoderBlock(nn.Module):
    """Attention to x [B, T, D], then to the memory [B, S, D], then an MLP."""

    config: T5Config
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        _: None,
        mask: jax.Array,
        bias: jax.Array,
        memory: jax.Array | None,
        memory_mask: jax.Array | None,
        positions: jax.Array | None,
    ) -> tuple[jax.Array, None]:
        fields = (self.config, self.deterministic)
        x = Attention(*fields, name="self_attention")(x, None, mask, bias, positions)
        x = Attention(*fields, to_memory=True, name="cross_attention")(
            x, memory, memory_mask, None, positions
        )
        return Mlp(*fields, name="mlp")(x), None


class Stack(nn.Module):
    """All blocks of the encoder or the decoder, applied to embedded tokens [B, T, D]."""

    config: T5Config
    block: type[nn.Module]
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
        x = _dropout(c, deterministic)(x)
        x, _ = run_blocks(
            self.block, c, (deterministic,), x, mask, bias, *inputs,
            layers=range(self.layers), name="block",
        )  # fmt: skip
        return _dropout(c, deterministic)(norm(c, "final_layer_norm")(x))

    @nn.nowrap
    def _bias(self, positions: jax.Array, keys: int) -> jax.Array:
        """Computes the bias of all blocks from one row of the table a distance.

        It is [H, T, K] for positions [T], and [B, H, T, K] for [B, T].
        """
        c = self.config
        table = nn.Embed(
            c.relative_attention_num_buckets, c.num_heads, dtype=c.dtype,
            embedding_init=_normal(c, c.d_model), name="relative_attention_bias",
        )  # fmt: skip
        rows = buckets(np.arange(1 - keys, keys), c, is_decoder=self.is_decoder)
        distances = jnp.arange(keys) - positions[..., None] + keys - 1
        return jnp.moveaxis(table(jnp.asarray(rows))[distances], -1, -3)


class T5(EncoderDecoder):
    """Source int [B, S] and target int [B, T] -> logits [B, T, V] in fp32 or wider."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(c.initializer_factor)
        self.shared: nn.Embed = nn.Embed(
            c.vocab_size, c.d_model, dtype=c.dtype, embedding_init=init
        )
        self.encoder: Stack = Stack(c, EncoderBlock, c.num_layers, is_decoder=False)
        self.decoder: Stack = Stack(c, DecoderBlock, c.num_decoder_layers, is_decoder=True)
        if not c.tie_word_embeddings:
            self.lm_head: nn.Dense = _dense(c.vocab_size, 1, c)

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


def norm(c: T5Config, name: str) -> nn.RMSNorm:
    """Returns the norm of D features."""
    scale = nn.initializers.constant(c.initializer_factor)
    return nn.RMSNorm(c.layer_norm_epsilon, dtype=c.dtype, scale_init=scale, name=name)


def _dense(features: int, fan_in: int, c: T5Config, name: str | None = None) -> nn.Dense:
    init = _normal(c, fan_in)
    return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)


def _normal(c: T5Config, fan_in: int) -> Callable[..., jax.Array]:
    init: Callable[..., jax.Array] = nn.initializers.normal(c.initializer_factor * fan_in**-0.5)
    return init


def _dropout(c: T5Config, deterministic: bool) -> nn.Dropout:
    return nn.Dropout(c.dropout_rate, deterministic=deterministic)
