"""Llama and its relatives in flax linen: RMSNorm, rotary positions, grouped-query attention, GLU.

Options of the config turn it into a Mistral, Qwen 2 or 3, Gemma 2, Phi-3 or Mixtral
(`zerojax.models.hugging_face.decoders` has those of each). Module names follow Hugging Face's
(`embed_tokens`, `layers_0`, `self_attn.q_proj`, ...). The model is called like
`zerojax.models.gpt.GPT`, so that the same train step works for both. Devices and shardings enter
only through the fields `attention`, `sequence`, `tensor` and `per_device`.

>>> model = Llama(LlamaConfig(**SIZES["llama-tiny"]))
>>> tokens = jnp.zeros((8, 16), jnp.int32)
>>> params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
>>> apply = jax.jit(model.apply)                        # logits [8, 16, 256] without targets
>>> apply({"params": params}, tokens, targets=tokens).shape
(8, 16)

Shapes: B batch, T time, D n_embd, H n_head, G n_kv_head, d head_size, F n_inner, V vocab_size,
C num_labels, L n_layer.
"""

import dataclasses
import math
from functools import partial
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zerojax.models.blocks import (
    INIT_STD,
    Attention,
    check_length,
    dense,
    embed,
    grouped_attention,
    last_tokens,
    padding_mask,
    run_blocks,
    split_heads,
    with_mask,
)
from zerojax.models.cache import attend_cached, check_cached
from zerojax.models.config import Fields, Flag, Positive, Size, Sizes, one_of
from zerojax.models.experts import Activation, Experts, PerDevice
from zerojax.models.layout import Layout
from zerojax.models.loss import logits_or_losses, widen
from zerojax.models.rope import RopeConfig, Tables, rotary_tables, rotate
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.step.sequence import SequenceAxis

ACTIVATIONS: dict[str, Activation] = {
    "silu": nn.silu,
    "gelu_pytorch_tanh": partial(nn.gelu, approximate=True),
}
WINDOWED, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(RopeConfig):
    """Sizes and options of a Llama, named as in `GPTConfig`; comments have Hugging Face's names.

    `n_kv_head=None` gives each query head its own key and value head. The statistics of RMSNorm and
    the rotation are always in fp32. `mlp_chunks` splits the sequence into that many chunks and runs
    the MLP on them one after another (`zerojax.tiled`); `loss_chunks` does so for the logits and
    the loss if there are targets. `RopeConfig` has the options of the rotation.

    >>> config = LlamaConfig(**SIZES["llama-70b"])
    >>> config.n_head, config.kv_heads, config.head_size
    (64, 8, 128)
    """

    vocab_size: Size
    block_size: Size  # max_position_embeddings
    n_layer: Size  # num_hidden_layers
    n_head: Size  # num_attention_heads
    n_embd: Size  # hidden_size
    n_inner: Size  # intermediate_size
    n_kv_head: Size | None = None  # num_key_value_heads
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: Flag = False
    mlp_chunks: Size | None = None
    loss_chunks: Size | None = None
    model_type: str = "llama"  # which decides the tensors of a Hugging Face folder
    head_dim: Size | None = None  # of a head, where it is not n_embd / n_head
    hidden_act: Annotated[str, one_of(*ACTIVATIONS)] = "silu"
    qkv_bias: Flag = False
    output_bias: Flag = False  # of the attention's last product
    mlp_bias: Flag = False
    qk_norm: Flag = False  # an RMSNorm of each query and key head
    sliding_window: Size | None = None  # positions to which a position attends, itself included
    layer_types: tuple[str, ...] = ()  # of each layer, if the window is not that of all layers
    query_pre_attn_scalar: Positive | None = None  # its root divides the scores, not that of d
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    scaled_embedding: Flag = False  # times sqrt(n_embd)
    unit_offset: Flag = False  # RMSNorm multiplies by 1 + scale
    post_norms: Flag = False  # attention and MLP have a norm at their end too
    num_local_experts: Size | None = None
    num_experts_per_tok: int = 2
    num_labels: Size | None = None  # a head for classes of rows in place of the LM head
    pad_token_id: int | None = None  # for that head

    computed: ClassVar = {"n_kv_head": "kv_heads", "head_dim": "head_size"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.n_embd % (2 * self.n_head):
            even = (
                f"be a multiple of {2 * self.n_head}, for n_head = {self.n_head} heads of even size"
            )
            self.reject("n_embd", even)
        if self.n_kv_head:
            self.check_heads("n_head", "n_kv_head")
        self.check_rope(self.head_size)
        unknown = {*self.layer_types} - {WINDOWED, FULL}
        if self.layer_types and (unknown or len(self.layer_types) != self.n_layer):
            self.reject("layer_types", f"have {self.n_layer} times {WINDOWED!r} or {FULL!r}")
        if self.num_local_experts and not 0 < self.num_experts_per_tok <= self.num_local_experts:
            self.reject("num_experts_per_tok", f"be in 1 ... {self.num_local_experts}")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: n_kv_head, or n_head."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_size(self) -> int:
        """Number of features of a head."""
        return self.head_dim or self.n_embd // self.n_head


def _size(
    n_layer: int, n_head: int, n_embd: int, n_inner: int, eps: float = 1e-6, **other: int
) -> Fields:
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_inner=n_inner)
    return dict(vocab_size=32000, block_size=2048, rms_norm_eps=eps) | sizes | other


# Numbers of parameters; the first config is for tests, the next four are from Touvron et al. 2023
# (arXiv:2302.13971), and the last is Llama 2 with grouped queries (arXiv:2307.09288).
SIZES: Sizes = {
    "llama-tiny": _size(2, 4, 32, 96, vocab_size=256, block_size=32, n_kv_head=2),  # 41k
    "llama-7b": _size(32, 32, 4096, 11008),  # 6.74B
    "llama-13b": _size(40, 40, 5120, 13824),  # 13.0B
    "llama-30b": _size(60, 52, 6656, 17920),  # 32.5B
    "llama-65b": _size(80, 64, 8192, 22016, 1e-5),  # 65.3B
    # From Llama 3 (arXiv:2407.21783).
    "llama3-8b": _size(32, 32, 4096, 14336, 1e-5, vocab_size=128256, block_size=8192, n_kv_head=8)
    | {"rope_theta": 500000.0},  # 8.03B
    "llama-70b": _size(80, 64, 8192, 28672, 1e-5, block_size=4096, n_kv_head=8),  # 69.0B
}


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    config: LlamaConfig
    attention: Attention
    layout: Layout

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        tables: Tables,
        window: jax.Array | int | None,
        mask: jax.Array | None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        c, layout, attention = self.config, self.layout, self.attention

        def heads(count: int, name: str) -> jax.Array:
            features = _product(x, count * c.head_size, c, f"{name}_proj", c.qkv_bias)
            x_heads = split_heads(features, count)
            if c.qk_norm and name != "v":
                x_heads = _rms_norm(c, f"{name}_norm")(x_heads)
            return layout.heads(x_heads)

        q, k, v = heads(c.n_head, "q"), heads(c.kv_heads, "k"), heads(c.kv_heads, "v")
        q, k = rotate(q, tables), rotate(k, tables)
        if c.query_pre_attn_scalar:  # the attention divides by the root of d
            q *= math.sqrt(c.head_size / c.query_pre_attn_scalar)
        plain = partial(
            grouped_attention,
            window=c.sliding_window if window is None else window,
            softcap=c.attn_logit_softcapping,
        )
        attention = plain if attention is grouped_attention else attention
        attention = layout.attention(with_mask(attention, mask))
        y = attend_cached(self, attention, plain, q, k, v, positions)
        return _product(y.reshape(*x.shape[:-1], -1), c.n_embd, c, "o_proj", c.output_bias)


class MLP(nn.Module):
    """SwiGLU: [B, T, D] -> silu(gate) * up [B, T, F] -> [B, T, D]. Source: arXiv:2002.05202."""

    config: LlamaConfig
    layout: Layout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = _product(x, c.n_inner, c, "gate_proj", c.mlp_bias)
        up = _product(x, c.n_inner, c, "up_proj", c.mlp_bias)
        hidden = self.layout.features(ACTIVATIONS[c.hidden_act](gate) * up)
        return _product(hidden, c.n_embd, c, "down_proj", c.mlp_bias)


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)). The second result is `nn.scan`'s.

    `mask` is bool [B, T], False on padding.
    """

    config: LlamaConfig
    attention: Attention
    layout: Layout
    per_device: PerDevice | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        window: jax.Array | int | None,
        tables: Tables,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        c, layout = self.config, self.layout
        x = layout.tokens(x)
        attn = layout.branch(SelfAttention(c, self.attention, layout, name="self_attn"))
        mlp = layout.branch(layout.in_chunks(self._mlp(), c.mlp_chunks))
        a = attn(_rms_norm(c, "input_layernorm")(x), tables, window, mask, positions)
        if not c.post_norms:
            x = x + a
            return x + mlp(_rms_norm(c, "post_attention_layernorm")(x)), None
        x = x + _rms_norm(c, "post_attention_layernorm")(a)
        y = mlp(_rms_norm(c, "pre_feedforward_layernorm")(x))
        return x + _rms_norm(c, "post_feedforward_layernorm")(y), None

    def _mlp(self) -> nn.Module:
        c = self.config
        if not c.num_local_experts:
            return MLP(c, self.layout, name="mlp")
        return Experts(
            c.num_local_experts, c.num_experts_per_tok, c.n_inner, ACTIVATIONS[c.hidden_act],
            c.dtype, self.per_device, name="mlp",
        )  # fmt: skip


class Llama(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    With targets int [B, T] the result is the cross-entropy of each, [B, T], in place of logits. A
    Llama has no dropout, so that `deterministic` has no effect. `attention_mask` [B, T] is 0 or
    False on padding, on either side of a row; positions count from the row's first column, as in
    transformers.

    `attention` takes q, k, v and `mask` as `grouped_attention` does (`zerojax.models.attention` has
    fused implementations); it has to apply `sliding_window` itself. For a policy that the config's
    `remat` names, the results of products are called "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj" and "down_proj", those of a fused attention "attention". `sequence`
    shards rows along their tokens (`zero.sequence`); `tensor` shards the model over a mesh axis
    (`zerojax.models.tensor_parallel`). `per_device` is `zero.per_device`, for a model with experts
    on several devices.

    With `num_labels` the logits are [B, C], from each row's last token, and targets int [B].

    With `positions` int [B, T] the model keeps keys and values in the collection "cache", see
    `zerojax.models.cache`.
    """

    config: LlamaConfig
    attention: Attention = grouped_attention
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None
    per_device: PerDevice | None = None

    def __post_init__(self) -> None:
        c = self.config
        if self.attention is not grouped_attention and (c.attn_logit_softcapping or c.layer_types):
            raise ValueError(
                "attn_logit_softcapping and layer_types need "
                "zerojax.models.blocks.grouped_attention: use it"
            )
        if self.tensor and c.num_local_experts:
            raise ValueError(
                f"num_local_experts: experts are not sharded over {self.tensor.axis!r}: remove it"
            )
        if self.tensor:
            sizes = ("n_head", "kv_heads", "n_embd", "n_inner", "vocab_size")
            self.tensor.check(self.config, *sizes)
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
        c, attention, layout = self.config, self.attention, Layout(self.sequence, self.tensor)
        if positions is not None:
            check_cached(attention_mask, targets, c.num_labels)
            layout = layout.for_generation()
        if c.rope_type != "dynamic":  # which is for longer rows
            check_length(tokens, c, "block_size")
        if self.is_initializing():  # its batch need not divide among the devices
            attention, layout = grouped_attention, Layout()
        layout.check(tokens)
        table = embed(c.vocab_size, c.n_embd, c, INIT_STD, "embed_tokens")
        x = layout.embedded(table, tokens)
        if c.scaled_embedding:
            x *= jnp.asarray(math.sqrt(c.n_embd), x.dtype)
        tables = rotary_tables(tokens.shape[1], c.head_size, c, c.block_size, positions)
        if positions is None:
            tables = jax.tree.map(layout.positions, tables)
        # No distance reaches the window of a layer that sees all rows.
        widths = {WINDOWED: c.sliding_window, FULL: jnp.iinfo(jnp.int32).max}
        windows = [widths[kind] for kind in c.layer_types]
        x, _ = run_blocks(
            Block, c, (attention, layout, self.per_device), x, tables,
            padding_mask(attention_mask, tokens), positions,
            layers=range(c.n_layer), name="layers",
            each=jnp.array(windows) if c.scan and windows else windows or None,
        )  # fmt: skip
        x = layout.gathered(_rms_norm(c, "norm")(layout.tokens(x)))
        if c.num_labels:
            x = last_tokens(x, tokens, c.pad_token_id)
            score = dense(c.num_labels, c, INIT_STD, "score", use_bias=False)
            return logits_or_losses(score(x), targets)
        head = None
        if not c.tie_word_embeddings:
            head = dense(c.vocab_size, c, INIT_STD, "lm_head", use_bias=False)
        if targets is not None and c.loss_chunks and not self.is_initializing():
            kernel = head.variables["params"]["kernel"] if head else table.embedding.T

            def losses(x: jax.Array, targets: jax.Array) -> jax.Array:
                logits = jnp.dot(*nn.dtypes.promote_dtype(x, kernel, dtype=c.dtype))
                return logits_or_losses(_capped(layout.features(logits), c), targets)

            return layout.in_chunks(losses, c.loss_chunks)(x, targets)
        logits = head(x) if head else table.attend(x)
        return logits_or_losses(_capped(layout.features(logits), c), targets)


class OffsetRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + scale, in fp32 or wider."""

    epsilon: float
    dtype: DTypeLike | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        dtype = nn.dtypes.canonicalize_dtype(x, scale, dtype=self.dtype)
        wide = widen(x)
        root = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * root * (1 + widen(scale))).astype(dtype)


def _capped(logits: jax.Array, c: LlamaConfig) -> jax.Array:
    cap = c.final_logit_softcapping
    return (cap * jnp.tanh(widen(logits) / cap)).astype(logits.dtype) if cap else logits


def _product(x: jax.Array, features: int, c: LlamaConfig, name: str, bias: bool) -> jax.Array:
    """Runs a layer on x [..., D]; a policy can name the result [..., features] as the layer."""
    return checkpoint_name(dense(features, c, INIT_STD, name, use_bias=bias)(x), name)


def _rms_norm(c: LlamaConfig, name: str) -> nn.Module:
    norm = OffsetRMSNorm if c.unit_offset else nn.RMSNorm
    return norm(c.rms_norm_eps, dtype=c.dtype, name=name)
