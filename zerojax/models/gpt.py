"""GPT-2 in flax linen, the model of the main job and of the memory benchmarks.

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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.kernels import FusedDenseGelu, FusedLayerNorm, Kernels
from zerojax.models.loss import cross_entropy, widen
from zerojax.models.loss import loss_fn as loss_fn
from zerojax.models.tensor_parallel import SideBySide, TensorParallel
from zerojax.step.sequence import SequenceAxis
from zerojax.trace.tiled import tiled

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

LAYER_NORM_EPS = 1e-5
INIT_STD = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and options of a GPT.

    `dtype=None` computes in the parameters' dtype, so that a model with bf16 parameters computes in
    bf16; LayerNorm's statistics, the softmax, the logits and the loss are always in fp32.
    `scan` stacks the L blocks' parameters into `[L, ...]` leaves and compiles one block, not L.
    `remat` saves only each block's input and recomputes the rest in the backward pass.
    `mlp_chunks` splits the sequence into that many chunks and runs the MLP on them one after
    another (`zerojax.tiled`). `hugging_face` has the other contents of a Hugging Face folder's
    files, as JSON, to write them back.
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    scan: bool = False
    remat: bool = False
    mlp_chunks: int | None = None
    dtype: Any = None
    hugging_face: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "mlp_chunks"):
            value = getattr(self, name)
            if value is None and name == "mlp_chunks":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"GPTConfig.{name} must be a positive int, not {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"GPTConfig.n_embd = {self.n_embd} does not divide into n_head = {self.n_head} "
                "heads: choose a multiple"
            )
        rate = self.dropout
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ValueError(f"GPTConfig.dropout must be in [0, 1), not {self.dropout!r}")

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
SIZES: dict[str, dict[str, Any]] = {
    "tiny": _size(32, 2, 2, 32, vocab_size=256),  # 35k
    "mini": _size(128, 4, 4, 160, vocab_size=256),  # 1.3M
    "small": _size(1024, 12, 12, 768),  # 124M
    "medium": _size(1024, 24, 16, 1024),  # 355M
    "large": _size(1024, 36, 20, 1280),  # 774M
    "gpt2-xl": _size(1024, 48, 25, 1600),  # 1.56B
}


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, dropout: Callable[..., jax.Array] = lambda x: x
) -> jax.Array:
    """Computes causal softmax(q k^T / sqrt(d)) v for `[B, T, H, d]`, softmax in fp32 or wider.

    The product computes the scores in the inputs' dtype, and the softmax widens them: compiled for
    a GPU, a block of 25 heads and 4 x 1024 tokens needs 390 MB less at peak than with fp32 scores.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(widen(scores))
    return jnp.einsum("bhqk,bkhd->bqhd", dropout(weights.astype(q.dtype)), v)


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    config: GPTConfig
    deterministic: bool
    kernels: Kernels | None = None
    attention: Attention | None = None
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, tensor = self.config, self.tensor
        if tensor:
            init = nn.initializers.normal(INIT_STD)
            parts = SideBySide(tensor, 3, c.n_embd, init, c.dtype, name="c_attn")(x)
        else:
            parts = jnp.split(_dense(3 * c.n_embd, INIT_STD, c, "c_attn")(x), 3, axis=-1)
        q, k, v = (a.reshape(*x.shape[:2], c.n_head, -1) for a in parts)
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        has_no_dropout = self.deterministic or not c.dropout
        if self.kernels and has_no_dropout and not self.attention:
            y = self.kernels.attention(q, k, v, attention)
        else:
            unfused = functools.partial(attention, dropout=dropout)
            attend = self.attention if self.attention and has_no_dropout else unfused
            heads = tensor.sharded_heads if tensor else None
            y = (self.sequence.attention(attend, sharded=heads) if self.sequence else attend)(
                q, k, v
            )
        return _dense(c.n_embd, c.residual_std, c, "c_proj")(y.reshape(x.shape))


class MLP(nn.Module):
    """[B, T, D] -> [B, T, 4D] -> gelu -> [B, T, D]."""

    config: GPTConfig
    kernels: Kernels | None = None
    tensor: TensorParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, width = self.config, 4 * self.config.n_embd
        if self.kernels:
            init = nn.initializers.normal(INIT_STD)
            h = FusedDenseGelu(self.kernels, width, init, c.dtype, name="c_fc")(x)
        else:
            h = nn.gelu(_dense(width, INIT_STD, c, "c_fc")(x), approximate=True)
        h = self.tensor.features(h) if self.tensor else h
        return _dense(c.n_embd, c.residual_std, c, "c_proj")(h)


class Block(nn.Module):
    """x + attn(ln(x)), then x + mlp(ln(x)). The second argument and result are `nn.scan`'s."""

    config: GPTConfig
    deterministic: bool
    kernels: Kernels | None = None
    attention: Attention | None = None
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        c, kernels, sequence, tensor = self.config, self.kernels, self.sequence, self.tensor
        x = sequence.tokens(x) if sequence and not tensor else x
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        attn: Callable[..., Any] = SelfAttention(
            c, self.deterministic, kernels, self.attention, sequence, tensor, name="attn"
        )
        mlp: Callable[..., Any] = MLP(c, kernels, tensor, name="mlp")
        shards = sequence.size if sequence else 1
        mlp = tiled(mlp, chunks=c.mlp_chunks, shards=shards) if c.mlp_chunks else mlp
        attn, mlp = (tensor.between(attn), tensor.between(mlp)) if tensor else (attn, mlp)
        a = dropout(attn(_layer_norm(c, "ln_1", kernels)(x)))
        ln_2 = _layer_norm(c, "ln_2", kernels)
        normalized, x = ln_2(a, x) if kernels else (ln_2(x + a), x + a)
        return x + dropout(mlp(normalized)), None


class GPT(nn.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    With targets int [B, T] the result is the cross-entropy of each, [B, T], in place of logits.
    With `kernels` the norms, the activations, the attention and that loss are fused. `attention`
    takes q, k and v [B, T, H, d] and is used only without dropout (`zerojax.models.attention` has
    fused implementations). `sequence` shards rows along their tokens (`zero.sequence`, not together
    with `kernels`); `tensor` shards the model over a mesh axis (`zerojax.models.tensor_parallel`).
    """

    config: GPTConfig
    kernels: Kernels | None = None
    attention: Attention | None = None
    sequence: SequenceAxis | None = None
    tensor: TensorParallel | None = None

    def __post_init__(self) -> None:
        if self.tensor:
            check_cut(self.tensor, self.config, self.kernels)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, tokens: jax.Array, deterministic: bool = True, targets: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        kernels, attention = self.kernels, self.attention
        sequence, tensor = self.sequence, self.tensor
        if self.is_initializing():  # its batch need not divide among the devices
            kernels = attention = sequence = tensor = None
        if kernels and sequence:
            raise ValueError(
                "GPT: its fused kernels take full rows, but the mesh's axis 'seq' splits them "
                "along their tokens: pass kernels or sequence, not both"
            )
        if tensor:
            tensor.check_tokens(tokens)
        if tokens.shape[1] > c.block_size:
            raise ValueError(
                f"{tokens.shape[1]} tokens in a row, but block_size={c.block_size}: cut the "
                "rows, or choose a config with a larger one"
            )
        wte = _embed(c.vocab_size, c, "wte")
        wpe = _embed(c.block_size, c, "wpe")
        positions = jnp.arange(tokens.shape[1])
        x = tensor.looked_up(wte(tokens)) if tensor else wte(tokens)
        x = x + wpe(sequence.positions(positions) if sequence else positions)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)

        # XLA does no CSE across iterations of a scan, so that the barrier would only cost time.
        block = nn.remat(Block, prevent_cse=not c.scan) if c.remat else Block
        if c.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=c.n_layer,
            )
            x, _ = stack(c, deterministic, kernels, attention, sequence, tensor, name="h")(x, None)
        else:
            for i in range(c.n_layer):
                layer = block(c, deterministic, kernels, attention, sequence, tensor, name=f"h_{i}")
                x, _ = layer(x)
        x = _layer_norm(c, "ln_f", kernels)(x)
        if kernels and targets is not None:
            return kernels.losses(x, wte.embedding, targets)
        logits = tensor.features(wte.attend(tensor.gathered(x))) if tensor else wte.attend(x)
        return widen(logits) if targets is None else cross_entropy(widen(logits), targets)


def check_cut(tensor: TensorParallel, config: GPTConfig, kernels: Kernels | None) -> None:
    """Checks that a GPT can be sharded over the axis of `tensor`.

    Raises:
      ValueError: A size does not divide among the devices, or `kernels` are set.
    """
    if kernels:
        raise ValueError(
            "kernels: the fused layers do not know of tensor parallelism. Leave them out, and give "
            f"the GPT only attention=fused_attention(zero, sharded={{{tensor.axis!r}: 2}}), or "
            f"leave {tensor.axis!r} out of the mesh"
        )
    tensor.check(config, "n_head", "n_embd", "vocab_size")


def stack_blocks(params: dict[str, Any], name: str = "h") -> dict[str, Any]:
    """Stacks the parameters of an unrolled model (`h_0`, `h_1`, ...) for `scan=True` (`h`).

    `name` is the name of the blocks: "layers" for `zerojax.models.llama.Llama`.
    """
    rest = {key: leaf for key, leaf in params.items() if not key.startswith(f"{name}_")}
    blocks = [params[f"{name}_{i}"] for i in range(len(params) - len(rest))]
    return rest | {name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def _dense(features: int, std: float, c: GPTConfig, name: str) -> nn.Dense:
    return nn.Dense(features, dtype=c.dtype, kernel_init=nn.initializers.normal(std), name=name)


def _embed(rows: int, c: GPTConfig, name: str) -> nn.Embed:
    init = nn.initializers.normal(INIT_STD)
    return nn.Embed(rows, c.n_embd, dtype=c.dtype, embedding_init=init, name=name)


def _layer_norm(c: GPTConfig, name: str, kernels: Kernels | None) -> Any:
    if kernels:
        return FusedLayerNorm(kernels, LAYER_NORM_EPS, name=name)
    return nn.LayerNorm(LAYER_NORM_EPS, dtype=c.dtype, name=name)
