"""Llama in flax linen: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Module names follow Hugging Face's (`embed_tokens`, `layers_0`, `self_attn.q_proj`, ...). The model
is called like `zerojax.models.gpt.GPT`, so that the same train step works for both. Devices and
shardings enter only through the fields `attention`, `sequence` and `tensor`.

>>> model = Llama(LlamaConfig(**SIZES["llama-tiny"]))
>>> tokens = jnp.zeros((8, 16), jnp.int32)
>>> params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
>>> apply = jax.jit(model.apply)                        # logits [8, 16, 256] without targets
>>> apply({"params": params}, tokens, targets=tokens).shape
(8, 16)

Shapes: B batch, T time, D n_embd, H n_head, G n_kv_head, d = D / H, F n_inner, V vocab_size,
L n_layer.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.blocks import (
    INIT_STD,
    Attention,
    causal_attention,
    check_length,
    parameters,
    run_blocks,
    split_heads,
)
from zerojax.models.config import Fields, ModelConfig, Sizes
from zerojax.models.layout import Layout
from zerojax.models.loss import logits_or_losses, widen
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.step.sequence import SequenceAxis


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Sizes and options of a Llama, named as in `GPTConfig`; comments have Hugging Face's names.

    `n_kv_head=None` gives each query head its own key and value head. The statistics of RMSNorm and
    the rotation are always in fp32. `mlp_chunks` splits the sequence into that many chunks and runs
    the MLP on them one after another (`zerojax.tiled`); `loss_chunks` does so for the logits and
    the loss if there are targets.

    >>> config = LlamaConfig(**SIZES["llama-70b"])
    >>> config.n_head, config.kv_heads, config.head_size
    (64, 8, 128)
    """

    vocab_size: int
    block_size: int  # max_position_embeddings
    n_layer: int  # num_hidden_layers
    n_head: int  # num_attention_heads
    n_embd: int  # hidden_size
    n_inner: int  # intermediate_size
    n_kv_head: int | None = None  # num_key_value_heads
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    mlp_chunks: int | None = None
    loss_chunks: int | None = None

    def __post_init__(self) -> None:
        self.check_sizes("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner")
        self.check_optional_sizes("n_kv_head", "mlp_chunks", "loss_chunks")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(
                f"LlamaConfig.n_embd = {self.n_embd} does not divide into n_head = {self.n_head} "
                "heads of an even size, as the rotation of pairs needs: choose a multiple of "
                f"{2 * self.n_head}"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(
                f"LlamaConfig.n_head = {self.n_head} does not divide among n_kv_head = "
                f"{self.kv_heads} key and value heads: choose a divisor of n_head"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ValueError(f"LlamaConfig.{name} must be a positive number, not {value!r}")
        for name in ("tie_word_embeddings", "scan", "remat"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"LlamaConfig.{name} must be True or False, not {value!r}")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: n_kv_head, or n_head."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_size(self) -> int:
        """Number of features of a head."""
        return self.n_embd // self.n_head


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


Tables = tuple[jax.Array, jax.Array]


def rotary_tables(tokens: int, head_size: int, theta: float) -> Tables:
    """Computes cos and sin, fp32 [T, 1, d / 2], of position x theta^(-2i / d) for each pair i.

    Source: Su et al. 2021, RoFormer (arXiv:2104.09864).

    >>> cos, sin = rotary_tables(3, 4, theta=10000.0)
    >>> cos.shape, [round(float(x), 4) for x in sin[:, 0, 0]]                # sin of 0, 1, 2
    ((3, 1, 2), [0.0, 0.8415, 0.9093])
    """
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Rotates each pair (i, i + d / 2) of [B, T, H, d] by its angle, in fp32 or wider.

    These are Hugging Face's pairs. Meta's files pair 2i with 2i + 1, which permutes the rows of
    `q_proj` and `k_proj`.

    >>> x = jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    >>> quarter_turn = (jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))
    >>> rotate(x, quarter_turn).ravel().tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    cos, sin = tables
    low, high = jnp.split(widen(x), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes causal attention of q [B, T, H, d] to k and v [B, T, G, d].

    Head h attends to key and value head h // (H / G). Keys and values are not repeated: the heads
    of a group are an extra dimension of q only.
    """
    grouped = q.reshape(*k.shape[:3], -1, q.shape[-1])
    attend_group = jax.vmap(causal_attention, (3, None, None), 3)
    return attend_group(grouped, k, v).reshape(q.shape)


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    config: LlamaConfig
    attention: Attention
    layout: Layout

    @nn.compact
    def __call__(self, x: jax.Array, tables: Tables) -> jax.Array:
        c, layout = self.config, self.layout

        def heads(count: int, name: str) -> jax.Array:
            return layout.heads(split_heads(_dense(count * c.head_size, c, name)(x), count))

        q, k = heads(c.n_head, "q_proj"), heads(c.kv_heads, "k_proj")
        v = heads(c.kv_heads, "v_proj")
        y = layout.attention(self.attention)(rotate(q, tables), rotate(k, tables), v)
        return _dense(c.n_embd, c, "o_proj")(y.reshape(x.shape))


class MLP(nn.Module):
    """SwiGLU: [B, T, D] -> silu(gate) * up [B, T, F] -> [B, T, D]. Source: arXiv:2002.05202."""

    config: LlamaConfig
    layout: Layout

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate, up = (_dense(c.n_inner, c, name)(x) for name in ("gate_proj", "up_proj"))
        return _dense(c.n_embd, c, "down_proj")(self.layout.features(nn.silu(gate) * up))


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)). The second argument and result are `nn.scan`'s."""

    config: LlamaConfig
    attention: Attention
    layout: Layout

    @nn.compact
    def __call__(self, x: jax.Array, _: None, tables: Tables) -> tuple[jax.Array, None]:
        c, layout = self.config, self.layout
        x = layout.tokens(x)
        attn = layout.branch(SelfAttention(c, self.attention, layout, name="self_attn"))
        mlp = layout.branch(layout.in_chunks(MLP(c, layout, name="mlp"), c.mlp_chunks))
        x = x + attn(_rms_norm(c, "input_layernorm")(x), tables)
        return x + mlp(_rms_norm(c, "post_attention_layernorm")(x)), None


class Llama(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    With targets int [B, T] the result is the cross-entropy of each, [B, T], in place of logits. A
    Llama has no dropout, so that `deterministic` has no effect. `attention` has the arguments of
    `grouped_attention` (`zerojax.models.attention` has fused implementations). `policy` selects
    what rematerialised blocks save in addition to their input, as for `jax.checkpoint`. `sequence`
    shards rows along their tokens (`zero.sequence`); `tensor` shards the model over a mesh axis
    (`zerojax.models.tensor_parallel`).
    """

    config: LlamaConfig
    attention: Attention = grouped_attention
    policy: Callable[..., bool] | None = None
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    def __post_init__(self) -> None:
        if self.tensor:
            sizes = ("n_head", "kv_heads", "n_embd", "n_inner", "vocab_size")
            self.tensor.check(self.config, *sizes)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, deterministic: bool = True, targets: jax.Array | None = None
    ) -> jax.Array:
        c, attention, layout = self.config, self.attention, Layout(self.sequence, self.tensor)
        check_length(tokens, c, "block_size")
        if self.is_initializing():  # its batch need not divide among the devices
            attention, layout = grouped_attention, Layout()
        layout.check(tokens)
        init = nn.initializers.normal(INIT_STD)
        embed = nn.Embed(
            c.vocab_size, c.n_embd, dtype=c.dtype, embedding_init=init, name="embed_tokens"
        )
        x = layout.embedded(embed(tokens))
        tables = rotary_tables(tokens.shape[1], c.head_size, c.rope_theta)
        tables = jax.tree.map(layout.positions, tables)
        x, _ = run_blocks(
            Block, (c, attention, layout), x, tables,
            layers=range(c.n_layer), name="layers", scan=c.scan, remat=c.remat, policy=self.policy,
        )  # fmt: skip
        x = layout.gathered(_rms_norm(c, "norm")(layout.tokens(x)))
        head = None if c.tie_word_embeddings else _dense(c.vocab_size, c, "lm_head")
        if targets is not None and c.loss_chunks and not self.is_initializing():
            table = parameters(head)["kernel"] if head else embed.embedding.T

            def losses(x: jax.Array, targets: jax.Array) -> jax.Array:
                logits = jnp.dot(*nn.dtypes.promote_dtype(x, table, dtype=c.dtype))
                return logits_or_losses(layout.features(logits), targets)

            return layout.in_chunks(losses, c.loss_chunks)(x, targets)
        logits = head(x) if head else embed.attend(x)
        return logits_or_losses(layout.features(logits), targets)


def _dense(features: int, c: LlamaConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(INIT_STD)
    return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)


def _rms_norm(c: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(c.rms_norm_eps, dtype=c.dtype, name=name)
