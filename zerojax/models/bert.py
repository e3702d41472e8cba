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
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import keys_mask, run_blocks
from zerojax.models.config import Rate, Size, Sizes, one_of
from zerojax.models.encoder import (
    ACTIVATIONS,
    Block,
    Body,
    Encoder,
    EncoderConfig,
    SelfAttention,
    dense,
    layer_norm,
)
from zerojax.models.loss import widen


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """Sizes and options of a BERT or a RoBERTa, by Hugging Face's names.

    A RoBERTa counts positions from `pad_token_id + 1`, and only tokens other than padding, so that
    a row has at most `max_position_embeddings - pad_token_id - 1` tokens.
    """

    model_type: Annotated[str, one_of("bert", "roberta")] = "bert"
    type_vocab_size: Size = 2
    pad_token_id: int = 0
    classifier_dropout: Rate | None = None  # None: hidden_dropout_prob

    @property
    def block_size(self) -> int:
        """The number of tokens of the longest row."""
        return self.max_position_embeddings - self.counts_tokens * (self.pad_token_id + 1)

    @property
    def counts_tokens(self) -> bool:
        """True for a RoBERTa, where padding has no position of its own."""
        return self.model_type == "roberta"

    def positions(self, input_ids: jax.Array) -> jax.Array:
        if not self.counts_tokens:
            return super().positions(input_ids)
        first, tokens = self.pad_token_id + 1, input_ids.shape[1]
        if tokens > self.block_size:
            raise ValueError(
                f"{tokens} tokens in a row, but max_position_embeddings = "
                f"{self.max_position_embeddings} of a RoBERTa begin at {first}: cut the rows, or "
                "increase it"
            )
        is_token = input_ids != self.pad_token_id
        return jnp.cumsum(is_token, axis=1) * is_token + self.pad_token_id


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


class Blocks(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    config: BertConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        c, fields = self.config, (self.deterministic, SelfAttention)
        layers = range(c.num_hidden_layers)
        return run_blocks(Block, c, fields, x, keys_mask(mask), layers=layers, name="layer")[0]


class Bert(Body):
    """Tokens int [B, T] -> [B, T, D]; arguments as for `BertClassifier`."""

    blocks = Blocks


class BertClassifier(Encoder):
    """Tokens int [B, T] -> logits [B, C], from the first token's features."""

    config: BertConfig

    body = Bert

    @nn.nowrap
    def head(self, x: jax.Array, body: Body, deterministic: bool) -> jax.Array:
        c = self.config
        rate = c.hidden_dropout_prob if c.classifier_dropout is None else c.classifier_dropout
        x = x[:, 0]
        if c.counts_tokens:
            x = nn.Dropout(rate, deterministic=deterministic)(x)
        x = jnp.tanh(dense(c.hidden_size, c, "pooler")(x))
        x = nn.Dropout(rate, deterministic=deterministic)(x)
        return dense(c.num_labels, c, "classifier")(x)


class BertMaskedLM(BertClassifier):
    """Tokens int [B, T] -> logits [B, T, V]; the table of tokens computes them."""

    @nn.nowrap
    def head(self, x: jax.Array, body: Body, deterministic: bool) -> jax.Array:
        c = self.config
        x = layer_norm(c)(ACTIVATIONS["gelu"](dense(c.hidden_size, c, "transform")(x)))
        bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,))
        table = body.variables["params"]["embeddings"]["word_embeddings"]["embedding"]
        x, table = nn.dtypes.promote_dtype(x, table, dtype=c.dtype)
        return widen(x @ table.T) + bias
