"""Options, embeddings, post-LayerNorm blocks and calls of BERT and DeBERTa.

The modules have the names of transformers. Shapes: B batch, T time, D hidden_size.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models import blocks
from zerojax.models.blocks import attend, check_length, split_heads
from zerojax.models.config import ModelConfig, Rate, Size
from zerojax.models.loss import widen

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Sizes and options of an encoder of tokens, by Hugging Face's names.

    Attributes:
      zeros_padding: Whether features of padding are zeros before the first block.
    """

    model_type: str
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    hidden_dropout_prob: Rate = 0.1
    attention_probs_dropout_prob: Rate = 0.1
    num_labels: Size = 2
    max_position_embeddings: Size = 512
    type_vocab_size: int = 0

    zeros_padding: ClassVar = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads("hidden_size", "num_attention_heads")

    @property
    def adds_positions(self) -> bool:
        """True where absolute positions are added to the tokens."""
        return True

    def positions(self, input_ids: jax.Array) -> jax.Array:
        """Returns the positions of tokens [B, T], int [T] or [B, T]."""
        return jnp.arange(input_ids.shape[1])


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D]: attention of all tokens to those of the mask."""

    config: EncoderConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        c = self.config
        q, k, v = (
            split_heads(dense(c.hidden_size, c, name)(x), c.num_attention_heads)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k)
        dropout = nn.Dropout(c.attention_probs_dropout_prob, deterministic=self.deterministic)
        return attend(scores, v, mask, dropout).reshape(x.shape)


class Output(nn.Module):
    """norm(x + dense(y)), the end of a branch y of x [B, T, D]."""

    config: EncoderConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        c = self.config
        y = hidden_dropout(c, self.deterministic)(dense(c.hidden_size, c, "dense")(y))
        return layer_norm(c)(x + y)


class Attention(nn.Module):
    """norm(x + attention(x))."""

    config: EncoderConfig
    deterministic: bool
    self_attention: type[nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, *inputs: jax.Array | None) -> jax.Array:
        y = self.self_attention(self.config, self.deterministic, name="self")(x, *inputs)
        return Output(self.config, self.deterministic, name="output")(x, y)


class DenseGelu(nn.Module):
    """[..., D] -> gelu [..., features]."""

    config: EncoderConfig
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS["gelu"](dense(self.features, self.config, "dense")(x))


class Block(nn.Module):
    """Attention, then an MLP. The second argument and result are `nn.scan`'s."""

    config: EncoderConfig
    deterministic: bool
    self_attention: type[nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, _: None, *inputs: jax.Array | None) -> tuple[jax.Array, None]:
        c, deterministic = self.config, self.deterministic
        x = Attention(c, deterministic, self.self_attention, name="attention")(x, *inputs)
        h = DenseGelu(c, c.intermediate_size, name="intermediate")(x)
        return Output(c, deterministic, name="output")(x, h), None


class Embeddings(nn.Module):
    """Tokens int [B, T] and their types -> [B, T, D]."""

    config: EncoderConfig
    deterministic: bool

    @nn.compact
    def __call__(
        self, input_ids: jax.Array, mask: jax.Array | None, token_type_ids: jax.Array | None
    ) -> jax.Array:
        c = self.config
        x = embed(c.vocab_size, c, "word_embeddings")(input_ids)
        if c.type_vocab_size:
            types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x += embed(c.type_vocab_size, c, "token_type_embeddings")(types)
        if c.adds_positions:
            check_length(input_ids, c, "max_position_embeddings")
            table = embed(c.max_position_embeddings, c, "position_embeddings")
            x += table(c.positions(input_ids))
        x = layer_norm(c)(x)
        return hidden_dropout(c, self.deterministic)(masked(x, mask) if c.zeros_padding else x)


class Body(nn.Module):
    """Tokens int [B, T] -> [B, T, D]; arguments as for `Encoder`."""

    config: EncoderConfig
    deterministic: bool = True

    blocks: ClassVar[type[nn.Module]]

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
    ) -> jax.Array:
        fields = self.config, self.deterministic
        embeddings = Embeddings(*fields, name="embeddings")
        x = embeddings(input_ids, attention_mask, token_type_ids)
        features: jax.Array = self.blocks(*fields, name="encoder")(x, attention_mask)
        return features


class Encoder(nn.Module):
    """Tokens int [B, T] -> logits in fp32 or wider, by a head on the features of a body.

    `attention_mask` [B, T] is 0 or False on padding; `token_type_ids` int [B, T] are used if
    `type_vocab_size` is not 0. `deterministic=False` needs `rngs={"dropout": key}`.
    """

    config: EncoderConfig

    body: ClassVar[type[Body]]

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        name = self.config.model_type.partition("-")[0]  # "deberta-v2" is named "deberta"
        body = self.body(self.config, deterministic, name=name)
        x = body(input_ids, attention_mask, token_type_ids)
        return widen(self.head(x, body, deterministic))

    def head(self, x: jax.Array, body: Body, deterministic: bool) -> jax.Array:
        """Computes logits from the body's features [B, T, D]."""
        raise NotImplementedError


def embed(rows: int, c: EncoderConfig, name: str) -> nn.Embed:
    """Returns a table [rows, D]."""
    return blocks.embed(rows, c.hidden_size, c, c.initializer_range, name)


def layer_norm(c: EncoderConfig, name: str = "LayerNorm") -> nn.LayerNorm:
    """Returns the norm of D features."""
    return nn.LayerNorm(c.layer_norm_eps, dtype=c.dtype, name=name)


def hidden_dropout(c: EncoderConfig, deterministic: bool) -> nn.Dropout:
    """Returns the dropout of features between layers."""
    return nn.Dropout(c.hidden_dropout_prob, deterministic=deterministic)


def dense(features: int, c: EncoderConfig, name: str) -> nn.Dense:
    """Returns a dense layer to the given number of features."""
    return blocks.dense(features, c, c.initializer_range, name)


def masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Replaces features [B, T, D] of padding by zeros."""
    return x if mask is None else x * mask[..., None].astype(x.dtype)
