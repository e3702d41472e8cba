"""GPT-2 in flax NNX: the twin of `zerojax.models.gpt`, with equal parameter names and shapes.

`nnx.to_pure_dict(nnx.state(model, nnx.Param))` equals the `params` of the linen model with
`scan=False`, and both models compute the same logits from these parameters.

Example::

    model = GPT(GPTConfig(**SIZES["mini"]), rngs=nnx.Rngs(params=0, dropout=1))
    logits = model(tokens)                                  # int [B, T] -> [B, T, V]
    losses = model(tokens, targets)                         # [B, T]
    model.eval()                                            # dropout off

Shapes as in `zerojax.models.gpt`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.models.gpt import INIT_STD, LAYER_NORM_EPS, GPTConfig, attention, check_cut
from zerojax.models.kernels import Kernels
from zerojax.models.loss import cross_entropy, widen
from zerojax.models.loss import loss_fn as loss_fn
from zerojax.models.tensor_parallel import TensorParallel, side_by_side


class SelfAttention(nnx.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    def __init__(
        self,
        config: GPTConfig,
        rngs: nnx.Rngs,
        kernels: Kernels | None,
        tensor: TensorParallel | None,
    ) -> None:
        c = config
        self.n_head, self.kernels, self.tensor, self.dtype = c.n_head, kernels, tensor, c.dtype
        self.c_attn = _linear(c.n_embd, 3 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj = _linear(c.n_embd, c.n_embd, c.residual_std, c, rngs)
        self.dropout = _dropout(c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.tensor:
            dense: Any = self.c_attn
            parts = side_by_side(x, dense.kernel[...], dense.bias[...], 3, self.tensor, self.dtype)
        else:
            parts = jnp.split(self.c_attn(x), 3, axis=-1)
        q, k, v = (a.reshape(*x.shape[:2], self.n_head, -1) for a in parts)
        if self.kernels and (self.dropout.deterministic or not self.dropout.rate):
            y = self.kernels.attention(q, k, v, attention)
        else:
            y = attention(q, k, v, self.dropout)
        return self.c_proj(y.reshape(x.shape))


class MLP(nnx.Module):
    """[B, T, D] -> [B, T, 4D] -> gelu -> [B, T, D]."""

    def __init__(
        self,
        config: GPTConfig,
        rngs: nnx.Rngs,
        kernels: Kernels | None,
        tensor: TensorParallel | None,
    ) -> None:
        c = config
        self.kernels, self.tensor, self.dtype = kernels, tensor, c.dtype
        self.c_fc = _linear(c.n_embd, 4 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj = _linear(4 * c.n_embd, c.n_embd, c.residual_std, c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.kernels:
            h = nnx.gelu(self.c_fc(x), approximate=True)
            return self.c_proj(self.tensor.features(h) if self.tensor else h)
        dense: Any = self.c_fc
        kernel, bias = dense.kernel[...], dense.bias[...]
        return self.c_proj(self.kernels.dense_gelu(x, kernel, bias, self.dtype))


class Block(nnx.Module):
    """x + attn(ln(x)), then x + mlp(ln(x))."""

    def __init__(
        self,
        config: GPTConfig,
        rngs: nnx.Rngs,
        kernels: Kernels | None,
        tensor: TensorParallel | None,
    ) -> None:
        self.kernels, self.tensor = kernels, tensor
        self.ln_1 = _layer_norm(config, rngs)
        self.attn = SelfAttention(config, rngs, kernels, tensor)
        self.ln_2 = _layer_norm(config, rngs)
        self.mlp = MLP(config, rngs, kernels, tensor)
        self.dropout = _dropout(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        attn: Callable[..., Any] = self.attn
        mlp: Callable[..., Any] = self.mlp
        if self.tensor:
            attn, mlp = self.tensor.between(attn), self.tensor.between(mlp)
        a = self.dropout(attn(_normalize(self.ln_1, x, self.kernels)))
        if self.kernels:
            normalized, x = _normalize(self.ln_2, a, self.kernels, x)
        else:
            x = x + a
            normalized = self.ln_2(x)
        return x + self.dropout(mlp(normalized))


class GPT(nnx.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    `targets`, `kernels` and `tensor` as in `zerojax.models.gpt`.
    """

    def __init__(
        self,
        config: GPTConfig,
        rngs: nnx.Rngs,
        kernels: Kernels | None = None,
        tensor: TensorParallel | None = None,
    ) -> None:
        if tensor:
            check_cut(tensor, config, kernels)
        if config.scan:
            raise ValueError("the NNX GPT has no stacked layout: use GPTConfig(scan=False)")
        self.config, self.kernels, self.tensor = config, kernels, tensor
        self.wte = _embed(config.vocab_size, config, rngs)
        self.wpe = _embed(config.block_size, config, rngs)
        self.dropout = _dropout(config, rngs)
        for i in range(config.n_layer):  # h_0, h_1, ... as linen names them
            setattr(self, f"h_{i}", Block(config, rngs, kernels, tensor))
        self.ln_f = _layer_norm(config, rngs)

    def __call__(self, tokens: jax.Array, targets: jax.Array | None = None) -> jax.Array:
        c = self.config
        if tokens.shape[1] > c.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens in a row, but block_size={c.block_size}")
        tensor, x = self.tensor, self.wte(tokens)
        if tensor:
            tensor.check_tokens(tokens)
            x = tensor.looked_up(x)
        x = self.dropout(x + self.wpe(jnp.arange(tokens.shape[1])))
        run_block = nnx.remat(_run_block) if c.remat else _run_block
        for i in range(c.n_layer):
            x = run_block(getattr(self, f"h_{i}"), x)
        x = _normalize(self.ln_f, x, self.kernels)
        if self.kernels and targets is not None:
            return self.kernels.losses(x, self.wte.embedding[...], targets)
        logits = self.wte.attend(tensor.gathered(x) if tensor else x)
        logits = widen(tensor.features(logits) if tensor else logits)
        return logits if targets is None else cross_entropy(logits, targets)


def _run_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


def _linear(n_in: int, n_out: int, std: float, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(n_in, n_out, dtype=c.dtype, kernel_init=init, rngs=rngs)


def _embed(rows: int, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Embed(rows, c.n_embd, dtype=c.dtype, embedding_init=init, rngs=rngs)


def _layer_norm(c: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(c.n_embd, epsilon=LAYER_NORM_EPS, dtype=c.dtype, rngs=rngs)


def _normalize(
    norm: Any, x: jax.Array, kernels: Kernels | None, residual: jax.Array | None = None
) -> Any:
    """Applies a LayerNorm to x; with a residual (fused only), to the sum, and returns both."""
    if not kernels:
        return norm(x)
    return kernels.layer_norm(x, norm.scale[...], norm.bias[...], LAYER_NORM_EPS, residual)


def _dropout(c: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns dropout; at rate 0 without a random stream, so that the state is only parameters."""
    return nnx.Dropout(c.dropout, rngs=rngs if c.dropout else None)
