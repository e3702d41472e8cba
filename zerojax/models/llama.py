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
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.gpt import INIT_STD, attention
from zerojax.models.loss import cross_entropy, widen
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.step.sequence import SequenceAxis
from zerojax.trace.tiled import tiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a Llama, named as in `GPTConfig`; comments have Hugging Face's names.

    `n_kv_head=None` gives each query head its own key and value head. `dtype=None` computes in the
    parameters' dtype, so that a model with bf16 parameters computes in bf16; RMSNorm's statistics,
    the rotation, the softmax, the logits and the loss are always in fp32. `scan` stacks the L
    blocks' parameters into `[L, ...]` leaves and compiles one block, not L. `remat` saves only each
    block's input and recomputes the rest in the backward pass. `mlp_chunks` splits the sequence
    into that many chunks and runs the MLP on them one after another (`zerojax.tiled`);
    `loss_chunks` does so for the logits and the loss if there are targets. `hugging_face` is as in
    `GPTConfig`.

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
    scan: bool = False
    remat: bool = False
    mlp_chunks: int | None = None
    loss_chunks: int | None = None
    dtype: Any = None
    hugging_face: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner"):
            _check_size(name, getattr(self, name))
        for name in ("n_kv_head", "mlp_chunks", "loss_chunks"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
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


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"LlamaConfig.{name} must be a positive int, not {value!r}")


def _size(
    n_layer: int, n_head: int, n_embd: int, n_inner: int, eps: float = 1e-6, **other: int
) -> dict[str, Any]:
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_inner=n_inner)
    return dict(vocab_size=32000, block_size=2048, rms_norm_eps=eps) | sizes | other


# Numbers of parameters; the first config is for tests, the next four are from Touvron et al. 2023
# (arXiv:2302.13971), and the last is Llama 2 with grouped queries (arXiv:2307.09288).
SIZES: dict[str, dict[str, Any]] = {
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
    attend_group = jax.vmap(attention, (3, None, None), 3)
    return attend_group(grouped, k, v).reshape(q.shape)


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    config: LlamaConfig
    attention: Attention
    tensor: TensorParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array, tables: Tables) -> jax.Array:
        c, tensor = self.config, self.tensor

        def heads(count: int, name: str) -> jax.Array:
            y = _dense(count * c.head_size, c, name)(x).reshape(*x.shape[:2], count, -1)
            return tensor.heads(y) if tensor else y

        q, k = heads(c.n_head, "q_proj"), heads(c.kv_heads, "k_proj")
        v = heads(c.kv_heads, "v_proj")
        y = self.attention(rotate(q, tables), rotate(k, tables), v)
        return _dense(c.n_embd, c, "o_proj")(y.reshape(x.shape))


class MLP(nn.Module):
    """SwiGLU: [B, T, D] -> silu(gate) * up [B, T, F] -> [B, T, D]. Source: arXiv:2002.05202."""

    config: LlamaConfig
    tensor: TensorParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, tensor = self.config, self.tensor
        gate, up = (_dense(c.n_inner, c, name)(x) for name in ("gate_proj", "up_proj"))
        h = nn.silu(gate) * up
        return _dense(c.n_embd, c, "down_proj")(tensor.features(h) if tensor else h)


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)). The second result is `nn.scan`'s."""

    config: LlamaConfig
    attention: Attention
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array, tables: Tables) -> tuple[jax.Array, None]:
        c, sequence, tensor = self.config, self.sequence, self.tensor
        x = sequence.tokens(x) if sequence and not tensor else x
        attn: Callable[..., Any] = SelfAttention(c, self.attention, tensor, name="self_attn")
        mlp: Callable[..., Any] = MLP(c, tensor, name="mlp")
        shards = sequence.size if sequence else 1
        mlp = tiled(mlp, chunks=c.mlp_chunks, shards=shards) if c.mlp_chunks else mlp
        attn, mlp = (tensor.between(attn), tensor.between(mlp)) if tensor else (attn, mlp)
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
        c = self.config
        if tokens.shape[1] > c.block_size:
            raise ValueError(
                f"{tokens.shape[1]} tokens in a row, but block_size={c.block_size}: cut the "
                "rows, or choose a config with a larger one"
            )
        init = nn.initializers.normal(INIT_STD)
        attention, sequence, tensor = self.attention, self.sequence, self.tensor
        if self.is_initializing():  # its batch need not divide among the devices
            attention, sequence, tensor = grouped_attention, None, None
        if sequence:
            attention = sequence.attention(
                attention, sharded=tensor.sharded_heads if tensor else None
            )
        if tensor:
            tensor.check_tokens(tokens)
        embed = nn.Embed(
            c.vocab_size, c.n_embd, dtype=c.dtype, embedding_init=init, name="embed_tokens"
        )
        x = tensor.looked_up(embed(tokens)) if tensor else embed(tokens)
        tables = rotary_tables(tokens.shape[1], c.head_size, c.rope_theta)
        tables = jax.tree.map(sequence.positions, tables) if sequence else tables

        # XLA does no CSE across iterations of a scan, so that the barrier would only cost time.
        remat = functools.partial(nn.remat, prevent_cse=not c.scan, policy=self.policy)
        block = remat(Block) if c.remat else Block
        if c.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=c.n_layer,
            )
            x, _ = stack(c, attention, sequence, tensor, name="layers")(x, tables)
        else:
            for i in range(c.n_layer):
                x, _ = block(c, attention, sequence, tensor, name=f"layers_{i}")(x, tables)
        x = sequence.tokens(x) if sequence and not tensor else x
        x = _rms_norm(c, "norm")(x)
        x = tensor.gathered(x) if tensor else x
        head = None if c.tie_word_embeddings else _dense(c.vocab_size, c, "lm_head")
        if targets is not None and c.loss_chunks and not self.is_initializing():
            table = head.variables["params"]["kernel"] if head else embed.embedding.T

            def losses(x: jax.Array, targets: jax.Array) -> jax.Array:
                logits = jnp.dot(*nn.dtypes.promote_dtype(x, table, dtype=c.dtype))
                logits = tensor.features(logits) if tensor else logits
                return cross_entropy(widen(logits), targets)

            shards = sequence.size if sequence else 1
            return tiled(losses, chunks=c.loss_chunks, shards=shards)(x, targets)
        logits = head(x) if head else embed.attend(x)
        logits = tensor.features(logits) if tensor else logits
        return widen(logits) if targets is None else cross_entropy(widen(logits), targets)


def _dense(features: int, c: LlamaConfig, name: str) -> nn.Dense:
    init = nn.initializers.normal(INIT_STD)
    return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=init, name=name)


def _rms_norm(c: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(c.rms_norm_eps, dtype=c.dtype, name=name)
