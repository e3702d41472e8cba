"""BERT and RoBERTa in flax linen, with heads for classes of rows and for masked tokens.

Post-LayerNorm blocks, exact GELU, learned positions, biases everywhere. The table of tokens also
computes the masked tokens' logits. Sources: Devlin et al. 2018, BERT (arXiv:1810.04805), Liu et al.
2019, RoBERTa (arXiv:1907.11692), and Hugging Face, whose names config and blocks have.

>>> config = BertConfig(**SIZES["bert-tiny"])
>>> model, tokens = BertMaskedLM(config), jnp.ones((8, 16), jnp.int32)
>>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens)            # or jax.jit(...)
>>> jax.eval_shape(model.apply, variables, tokens, tokens > 0)
ShapeDtypeStruct(shape=(8, 16, 128), dtype=float32)

Shapes: B batch, T time, D hidden_size, C num_labels, V vocab_size.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import check_length, run_blocks
from zerojax.models.config import Sizes
from zerojax.models.encoder_layers import (
    ACTIVATIONS,
    Block,
    EncoderConfig,
    SelfAttention,
    dense,
    embed,
    hidden_dropout,
    layer_norm,
)
from zerojax.models.loss import widen


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """Sizes and options of a BERT or a RoBERTa, by Hugging Face's names.

    A RoBERTa counts positions from `pad_token_id + 1`, and only tokens other than padding, so that
    a row has at most `max_position_embeddings - pad_token_id - 1` tokens.
    """

    model_type: str = "bert"
    type_vocab_size: int = 2
    pad_token_id: int = 0
    classifier_dropout: float | None = None  # None: hidden_dropout_prob

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_of("model_type", "bert", "roberta")
        self.check_sizes("type_vocab_size")
        if self.classifier_dropout is not None:
            self.check_rates("classifier_dropout")

    @property
    def block_size(self) -> int:
        """The number of tokens of the longest row."""
        return self.max_position_embeddings - self.counts_tokens * (self.pad_token_id + 1)

    @property
    def counts_tokens(self) -> bool:
        """True for a RoBERTa, where padding has no position of its own."""
        return self.model_type == "roberta"


SIZES: Sizes = {
    "bert-tiny": dict(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "bert-base": dict(
        vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        intermediate_size=3072,
    ),
}  # fmt: skip


class Embeddings(nn.Module):
    """Tokens int [B, T] and their types -> [B, T, D]."""

    config: BertConfig
    deterministic: bool

    def setup(self) -> None:
        c = self.config
        self.word_embeddings: nn.Embed = embed(c.vocab_size, c)
        self.position_embeddings: nn.Embed = embed(c.max_position_embeddings, c)
        self.token_type_embeddings: nn.Embed = embed(c.type_vocab_size, c)
        self.LayerNorm: nn.LayerNorm = nn.LayerNorm(c.layer_norm_eps, dtype=c.dtype)
        self.dropout: nn.Dropout = hidden_dropout(c, self.deterministic)

    def __call__(self, input_ids: jax.Array, token_type_ids: jax.Array | None) -> jax.Array:
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        x = self.LayerNorm(x + self.position_embeddings(self._positions(input_ids)))
        return self.dropout(x)

    def _positions(self, input_ids: jax.Array) -> jax.Array:
        c = self.config
        check_length(input_ids, c, "max_position_embeddings")
        if not c.counts_tokens:
            return jnp.arange(input_ids.shape[1])
        first, tokens = c.pad_token_id + 1, input_ids.shape[1]
        if tokens > c.block_size:
            raise ValueError(
                f"{tokens} tokens in a row, but max_position_embeddings = "
                f"{c.max_position_embeddings} of a RoBERTa begin at {first}: cut the rows, or "
                "increase it"
            )
        is_token = input_ids != c.pad_token_id
        return jnp.cumsum(is_token, axis=1) * is_token + c.pad_token_id


class Encoder(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    config: BertConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        c, fields = self.config, (self.deterministic, SelfAttention)
        keys = None if mask is None else mask[:, None, None, :].astype(bool)
        layers = range(c.num_hidden_layers)
        return run_blocks(Block, c, fields, x, keys, layers=layers, name="layer")[0]


class Bert(nn.Module):
    """Tokens int [B, T] -> [B, T, D]; arguments as for `BertClassifier`."""

    config: BertConfig
    deterministic: bool = True

    def setup(self) -> None:
        self.embeddings: Embeddings = Embeddings(self.config, self.deterministic)
        self.encoder: Encoder = Encoder(self.config, self.deterministic)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
    ) -> jax.Array:
        return self.encoder(self.embeddings(input_ids, token_type_ids), attention_mask)

    def scores(self, x: jax.Array) -> jax.Array:
        """Computes the product [..., V] of x [..., D] with the table of tokens."""
        return self.embeddings.word_embeddings.attend(x)


class BertClassifier(nn.Module):
    """Tokens int [B, T] -> logits [B, C] in fp32 or wider, from the first token's features.

    `attention_mask` [B, T] is 0 or False on padding; `token_type_ids` are int [B, T].
    `deterministic=False` needs `rngs={"dropout": key}`.
    """

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        c = self.config
        rate = c.hidden_dropout_prob if c.classifier_dropout is None else c.classifier_dropout
        body = Bert(c, deterministic, name=c.model_type)
        x = body(input_ids, attention_mask, token_type_ids)[:, 0]
        if c.counts_tokens:
            x = nn.Dropout(rate, deterministic=deterministic)(x)
        x = jnp.tanh(dense(c.hidden_size, c, "pooler")(x))
        x = nn.Dropout(rate, deterministic=deterministic)(x)
        return widen(dense(c.num_labels, c, "classifier")(x))


class BertMaskedLM(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; arguments as for `BertClassifier`."""

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        c = self.config
        body = Bert(c, deterministic, name=c.model_type)
        x = body(input_ids, attention_mask, token_type_ids)
        x = layer_norm(c)(ACTIVATIONS["gelu"](dense(c.hidden_size, c, "transform")(x)))
        bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,))
        return widen(body.scores(x)) + bias
