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
S position_buckets.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.deberta_config import SIZES as SIZES
from zerojax.models.deberta_config import DebertaConfig as DebertaConfig
from zerojax.models.disentangled import SelfAttention, dense, hidden_dropout
from zerojax.models.layers import run_blocks
from zerojax.models.loss import widen

ACTIVATIONS = {"gelu": lambda x: nn.gelu(x, approximate=False), "tanh": jnp.tanh}


class Output(nn.Module):
    """norm(x + dense(y)), the end of a branch y of x [B, T, D]."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        c = self.config
        y = hidden_dropout(c, self.deterministic)(dense(c.hidden_size, c, "dense")(y))
        return _layer_norm(c)(x + y)


class Attention(nn.Module):
    """norm(x + attention(x))."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, *inputs: jax.Array | None) -> jax.Array:
        y = SelfAttention(self.config, self.deterministic, name="self")(x, *inputs)
        return Output(self.config, self.deterministic, name="output")(x, y)


class DenseGelu(nn.Module):
    """[..., D] -> gelu [..., features]."""

    config: DebertaConfig
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS["gelu"](dense(self.features, self.config, "dense")(x))


class Block(nn.Module):
    """Attention, then an MLP. The second argument and result are `nn.scan`'s."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None, *inputs: jax.Array | None) -> tuple[jax.Array, None]:
        c, deterministic = self.config, self.deterministic
        x = Attention(c, deterministic, name="attention")(x, *inputs)
        h = DenseGelu(c, c.intermediate_size, name="intermediate")(x)
        return Output(c, deterministic, name="output")(x, h), None


class Conv(nn.Module):
    """norm(y + act(conv(x))) for the first block's input and output [B, T, D]."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array, mask: jax.Array | None) -> jax.Array:
        c, size = self.config, (self.config.conv_kernel_size,)
        init = nn.initializers.normal(c.initializer_range)
        conv = nn.Conv(c.hidden_size, size, dtype=c.dtype, kernel_init=init, name="conv")
        convolved = hidden_dropout(c, self.deterministic)(_masked(conv(x), mask))
        return _masked(_layer_norm(c)(y + ACTIVATIONS[c.conv_act](convolved)), mask)


class Embeddings(nn.Module):
    """Tokens int [B, T] -> [B, T, D], zeros on padding."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(
        self, input_ids: jax.Array, mask: jax.Array | None, token_type_ids: jax.Array | None
    ) -> jax.Array:
        c, tokens = self.config, input_ids.shape[1]
        x = _embed(c.vocab_size, c, "word_embeddings")(input_ids)
        if c.position_biased_input:
            if tokens > c.max_position_embeddings:
                raise ValueError(
                    f"{tokens} tokens in a row, but max_position_embeddings = "
                    f"{c.max_position_embeddings}"
                )
            table = _embed(c.max_position_embeddings, c, "position_embeddings")
            x += table(jnp.arange(tokens))
        if c.type_vocab_size:
            types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x += _embed(c.type_vocab_size, c, "token_type_embeddings")(types)
        return hidden_dropout(c, self.deterministic)(_masked(_layer_norm(c)(x), mask))


class Encoder(nn.Module):
    """[B, T, D] -> [B, T, D]."""

    config: DebertaConfig
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        c, fields, table = self.config, (self.config, self.deterministic), None
        if c.pos_att_type:
            table = _embed(2 * c.span, c, "rel_embeddings").embedding
            if c.norm_rel_ebd == "layer_norm":
                table = _layer_norm(c)(table)
        keys = None if mask is None else mask[:, None, None, :].astype(bool)

        def run(x: jax.Array, layers: range, scan: bool) -> jax.Array:
            inputs = (Block, fields, x, keys, table)
            return run_blocks(*inputs, layers=layers, name="layer", scan=scan, remat=c.remat)[0]

        layers = range(c.num_hidden_layers)
        if c.conv_kernel_size:
            y, layers = run(x, layers[:1], scan=False), layers[1:]
            x = Conv(*fields, name="conv")(x, y, mask)
        return run(x, layers, c.scan) if layers else x


class Deberta(nn.Module):
    """Tokens int [B, T] -> [B, T, D]; arguments as for `DebertaClassifier`."""

    config: DebertaConfig

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        embeddings = Embeddings(self.config, deterministic, name="embeddings")
        x = embeddings(input_ids, attention_mask, token_type_ids)
        return Encoder(self.config, deterministic, name="encoder")(x, attention_mask)


class DebertaClassifier(nn.Module):
    """Tokens int [B, T] -> logits [B, C] in fp32 or wider, from the first token's features.

    `attention_mask` [B, T] is 0 or False on padding; `token_type_ids` int [B, T] are used if
    `type_vocab_size` is not 0. `deterministic=False` needs `rngs={"dropout": key}`.
    """

    config: DebertaConfig

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        c = self.config
        body = Deberta(c, name="deberta")
        x = body(input_ids, attention_mask, token_type_ids, deterministic)[:, 0]
        x = hidden_dropout(c, deterministic)(DenseGelu(c, c.hidden_size, name="pooler")(x))
        return widen(dense(c.num_labels, c, "classifier")(x))


def _masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else x * mask[..., None].astype(x.dtype)


def _embed(rows: int, c: DebertaConfig, name: str) -> nn.Embed:
    init = nn.initializers.normal(c.initializer_range)
    return nn.Embed(rows, c.hidden_size, dtype=c.dtype, embedding_init=init, name=name)


def _layer_norm(c: DebertaConfig) -> nn.LayerNorm:
    return nn.LayerNorm(c.layer_norm_eps, dtype=c.dtype, name="LayerNorm")
