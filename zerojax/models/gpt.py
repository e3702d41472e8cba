"""GPT-2 in flax linen, the model of ``examples/run_clm`` and of the memory benchmarks.

Pre-LayerNorm blocks, learned positions, tanh-GELU, biases everywhere, output tied to the embedding.
Module and parameter names follow Hugging Face's (`wte`, `wpe`, `h_0`, `attn.c_attn`, ...). Devices
and shardings enter only through the fields `kernels`, `attention`, `sequence` and `tensor`.

Example::

    model = GPT(GPTConfig(**SIZES["mini"]))
    tokens = jnp.zeros((8, 128), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    logits = model.apply({"params": params}, tokens)                     # [8, 128, 256]
    loss = loss_fn(logits[:, :-1], tokens[:, 1:])                        # ln(256) = 5.55 at first

Shapes: B batch, T time, D n_embd, H n_head, V vocab_size, L n_layer.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from zerojax.models.blocks import (
    INIT_STD,
    Attention,
    causal_attention,
    check_length,
    dense,
    embed,
    last_tokens,
    padding_mask,
    run_blocks,
    split_heads,
    with_mask,
)
from zerojax.models.cache import attend_cached, check_cached
from zerojax.models.config import ModelConfig, Rate, Size, Sizes
from zerojax.models.kernels import Kernels, add_and_normalize, normalize
from zerojax.models.layout import Layout
from zerojax.models.loss import logits_or_losses
from zerojax.models.loss import loss_fn as loss_fn
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.step.sequence import SequenceAxis

LAYER_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Sizes and options of a GPT.

    `mlp_chunks` splits the sequence into that many chunks and runs the MLP on them one after
    another (`zerojax.tiled`). `num_labels` puts a head for classes of rows in place of the LM head;
    `pad_token_id` is for that head.
    """

    vocab_size: Size
    block_size: Size
    n_layer: Size
    n_head: Size
    n_embd: Size
    dropout: Rate = 0.0
    mlp_chunks: Size | None = None
    num_labels: Size | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads("n_embd", "n_head")

    @property
    def residual_std(self) -> float:
        """GPT-2's smaller initial std for the 2L projections that add to the residual stream."""
        return INIT_STD / math.sqrt(2 * self.n_layer)


def _size(
    block_size: int, n_layer: int, n_head: int, n_embd: int, vocab_size: int = 50304
) -> dict[str, int]:
    return dict(
        vocab_size=vocab_size, block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd
    )


# Numbers of parameters (tied embedding counted once); the first two are byte-level, the others have
# GPT-2's sizes with the vocabulary rounded up to a multiple of 64.
SIZES: Sizes = {
    "tiny": _size(32, 2, 2, 32, vocab_size=256),  # 35k
    "mini": _size(128, 4, 4, 160, vocab_size=256),  # 1.3M
    "small": _size(1024, 12, 12, 768),  # 124M
    "medium": _size(1024, 24, 16, 1024),  # 355M
    "large": _size(1024, 36, 20, 1280),  # 774M
    "gpt2-xl": _size(1024, 48, 25, 1600),  # 1.56B
}


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    config: GPTConfig
    deterministic: bool
    attention: Attention
    layout: Layout

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None, positions: jax.Array | None = None
    ) -> jax.Array:
        c, layout, attention = self.config, self.layout, self.attention
        heads = layout.split(dense(3 * c.n_embd, c, INIT_STD, "c_attn"), x, 3)
        q, k, v = (split_heads(checkpoint_name(a, "c_attn"), c.n_head) for a in heads)
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        if c.dropout and not self.deterministic:
            attention = functools.partial(causal_attention, dropout=dropout)
        attention = layout.attention(with_mask(attention, mask))
        y = attend_cached(self, attention, causal_attention, q, k, v, positions)
        return checkpoint_name(
            dense(c.n_embd, c, c.residual_std, "c_proj")(y.reshape(x.shape)), "attn.c_proj"
        )


class MLP(nn.Module):
    """[B, T, D] -> [B, T, 4D] -> gelu -> [B, T, D]."""

    config: GPTConfig
    layout: Layout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        h = checkpoint_name(dense(4 * c.n_embd, c, INIT_STD, "c_fc")(x), "c_fc")
        h = nn.gelu(h, approximate=True)
        return dense(c.n_embd, c, c.residual_std, "c_proj")(self.layout.features(h))


class Block(nn.Module):
    """x + attn(ln(x)), then x + mlp(ln(x)). The second argument and result are `nn.scan`'s.

    `mask` is bool [B, T], False on padding.
    """

    config: GPTConfig
    deterministic: bool
    attention: Attention
    layout: Layout
    kernels: Kernels | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        _: None,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        c, layout, kernels = self.config, self.layout, self.kernels
        x = layout.tokens(x)
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        attn = layout.branch(
            SelfAttention(c, self.deterministic, self.attention, layout, name="attn")
        )
        mlp = layout.branch(layout.in_chunks(MLP(c, layout, name="mlp"), c.mlp_chunks))
        a = dropout(attn(normalize(_layer_norm(c, "ln_1"), x, kernels), mask, positions))
        normalized, x = add_and_normalize(_layer_norm(c, "ln_2"), x, a, kernels)
        return x + dropout(mlp(normalized)), None


class GPT(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    With targets int [B, T] the result is the cross-entropy of each, [B, T], in place of logits.
    `attention_mask` [B, T] is 0 or False on padding, on either side of a row; positions count from
    the row's first column, as in transformers.

    With `kernels` the norms, the attention and that loss are fused. `attention`
    is an `Attention` (`zerojax.models.blocks`) and is used only without dropout
    (`zerojax.models.attention` has fused implementations). `sequence` shards rows along their
    tokens (`zero.sequence`, not together with `kernels`); `tensor` shards the model over a mesh
    axis (`zerojax.models.tensor_parallel`).

    With `num_labels` the logits are [B, num_labels], from each row's last token, and targets [B].

    With `positions` int [B, T] the model keeps keys and values in the collection "cache", see
    `zerojax.models.cache`.

    For a policy that the config's `remat` names, the results of products in a block are called
    "c_attn", "attn.c_proj" and "c_fc", those of a fused attention "attention".
    """

    config: GPTConfig
    kernels: Kernels | None = None
    attention: Attention | None = None
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    def __post_init__(self) -> None:
        if self.tensor and self.kernels:
            raise ValueError(
                "kernels: the fused layers do not support tensor parallelism: remove them and "
                f"pass only attention=fused_attention(zero, sharded={{{self.tensor.axis!r}: 2}}), "
                f"or remove {self.tensor.axis!r} from the mesh"
            )
        if self.tensor:
            self.tensor.check(self.config, "n_head", "n_embd", "vocab_size")
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        deterministic: bool = True,
        targets: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        c, kernels, attention = self.config, self.kernels, self.attention
        layout = Layout(self.sequence, self.tensor)
        if positions is not None:
            check_cached(attention_mask, targets, c.num_labels)
            layout = layout.for_generation()
        if self.is_initializing():  # its batch need not divide among the devices
            kernels, attention, layout = None, None, Layout()
        if kernels and layout.sequence:
            raise ValueError(
                "GPT: fused kernels take full rows, and the mesh has an axis 'seq': remove one of "
                "them"
            )
        layout.check(tokens)
        check_length(tokens, c, "block_size")
        if attention is None:
            attention = kernels.causal_attention if kernels else causal_attention
        wte = embed(c.vocab_size, c.n_embd, c, INIT_STD, "wte")
        wpe = embed(c.block_size, c.n_embd, c, INIT_STD, "wpe")
        columns = jnp.arange(tokens.shape[1])
        at = layout.positions(columns) if positions is None else positions
        x = layout.embedded(wte, tokens) + wpe(at)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        x, _ = run_blocks(
            Block, c, (deterministic, attention, layout, kernels), x,
            padding_mask(attention_mask, tokens), positions,
            layers=range(c.n_layer), name="h",
        )  # fmt: skip
        x = normalize(_layer_norm(c, "ln_f"), x, kernels)
        if kernels and targets is not None and not c.num_labels:
            return kernels.losses(x, wte.embedding, targets)
        x = layout.gathered(x)
        if c.num_labels:
            score = dense(c.num_labels, c, INIT_STD, "score", use_bias=False)
            return logits_or_losses(score(last_tokens(x, tokens, c.pad_token_id)), targets)
        return logits_or_losses(layout.features(wte.attend(x)), targets)


def _layer_norm(c: GPTConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name=name)
