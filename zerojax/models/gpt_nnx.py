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

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from zerojax.models.blocks import (
    INIT_STD,
    causal_attention,
    check_length,
    policy_of,
    split_heads,
)
from zerojax.models.cache import attend_cached, check_cached
from zerojax.models.gpt import LAYER_NORM_EPS, GPTConfig, check_cut
from zerojax.models.kernels import Kernels, add_and_normalize, normalize
from zerojax.models.layout import Layout
from zerojax.models.loss import logits_or_losses
from zerojax.models.loss import loss_fn as loss_fn
from zerojax.models.tensor_parallel import TensorParallel


class SelfAttention(nnx.Module):
    """[B, T, D] -> [B, T, D], each position attending to itself and earlier ones."""

    def __init__(
        self, config: GPTConfig, rngs: nnx.Rngs, layout: Layout, kernels: Kernels | None
    ) -> None:
        c = config
        self.n_head: int
        self.layout: Layout
        self.kernels: Kernels | None
        self.n_head, self.layout, self.kernels = c.n_head, layout, kernels
        self.c_attn: nnx.Linear = _linear(c.n_embd, 3 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj: nnx.Linear = _linear(c.n_embd, c.n_embd, c.residual_std, c, rngs)
        self.dropout: nnx.Dropout = _dropout(c, rngs)

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> None:
        """Creates the keys and values of rows [B, S, D], by default in the compute dtype."""
        features = self.c_proj.in_features
        shape = (*input_shape[:2], self.n_head, features // self.n_head)
        if dtype is None:
            dtype = self.c_attn.dtype or self.c_attn.kernel.dtype
        self.key: nnx.Cache[jax.Array] = nnx.Cache(jnp.zeros(shape, dtype))
        self.value: nnx.Cache[jax.Array] = nnx.Cache(jnp.zeros(shape, dtype))

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        heads = self.layout.split(self.c_attn, x, 3)
        q, k, v = (split_heads(a, self.n_head) for a in heads)
        if self.kernels and (self.dropout.deterministic or not self.dropout.rate):
            attention = self.kernels.causal_attention
        else:
            attention = functools.partial(causal_attention, dropout=self.dropout)
        y = attend_cached(self, attention, causal_attention, q, k, v, positions)
        return self.c_proj(y.reshape(x.shape))


class MLP(nnx.Module):
    """[B, T, D] -> [B, T, 4D] -> gelu -> [B, T, D]."""

    def __init__(
        self, config: GPTConfig, rngs: nnx.Rngs, layout: Layout, kernels: Kernels | None
    ) -> None:
        c = config
        self.layout: Layout
        self.kernels: Kernels | None
        self.layout, self.kernels = layout, kernels
        self.c_fc: nnx.Linear = _linear(c.n_embd, 4 * c.n_embd, INIT_STD, c, rngs)
        self.c_proj: nnx.Linear = _linear(4 * c.n_embd, c.n_embd, c.residual_std, c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.gelu(self.c_fc(x), approximate=True)
        return self.c_proj(self.layout.features(h))


class Block(nnx.Module):
    """x + attn(ln(x)), then x + mlp(ln(x))."""

    def __init__(
        self, config: GPTConfig, rngs: nnx.Rngs, layout: Layout, kernels: Kernels | None
    ) -> None:
        self.layout: Layout
        self.kernels: Kernels | None
        self.layout, self.kernels = layout, kernels
        self.ln_1: nnx.LayerNorm = _layer_norm(config, rngs)
        self.attn: SelfAttention = SelfAttention(config, rngs, layout, kernels)
        self.ln_2: nnx.LayerNorm = _layer_norm(config, rngs)
        self.mlp: MLP = MLP(config, rngs, layout, kernels)
        self.dropout: nnx.Dropout = _dropout(config, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        layout = self.layout if positions is None else self.layout.for_generation()
        attn, mlp = layout.branch(self.attn), layout.branch(self.mlp)
        a = self.dropout(attn(normalize(self.ln_1, x, self.kernels), positions))
        normalized, x = add_and_normalize(self.ln_2, x, a, self.kernels)
        return x + self.dropout(mlp(normalized))


class GPT(nnx.Module):
    """Tokens int [B, T] -> logits [B, T, V] in fp32 or wider; needs T <= block_size.

    `targets`, `kernels`, `tensor` and `positions` as in `zerojax.models.gpt`; `init_cache` of each
    `SelfAttention` creates the cache.
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
        if config.num_labels:
            raise ValueError("the NNX GPT has no head for labels: leave num_labels out")
        if config.scan:
            raise ValueError("the NNX GPT has no stacked layout: use GPTConfig(scan=False)")
        self.config: GPTConfig
        self.kernels: Kernels | None
        self.tensor: TensorParallel | None
        self.config, self.kernels, self.tensor = config, kernels, tensor
        self.wte: nnx.Embed = _embed(config.vocab_size, config, rngs)
        self.wpe: nnx.Embed = _embed(config.block_size, config, rngs)
        self.dropout: nnx.Dropout = _dropout(config, rngs)
        for i in range(config.n_layer):  # h_0, h_1, ... as linen names them
            setattr(self, f"h_{i}", Block(config, rngs, Layout(tensor=tensor), kernels))
        self.ln_f: nnx.LayerNorm = _layer_norm(config, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        targets: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        c, layout = self.config, Layout(tensor=self.tensor)
        if positions is not None:
            check_cached(None, targets, None)
            layout = layout.for_generation()
        check_length(tokens, c, "block_size")
        layout.check(tokens)
        at = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = layout.embedded(self.wte, tokens) + self.wpe(at)
        x = self.dropout(x)
        run_block = nnx.remat(_run_block, policy=policy_of(c.remat)) if c.remat else _run_block
        for i in range(c.n_layer):
            x = run_block(getattr(self, f"h_{i}"), x, positions)
        x = normalize(self.ln_f, x, self.kernels)
        if self.kernels and targets is not None:
            return self.kernels.losses(x, self.wte.embedding[...], targets)
        logits = layout.features(self.wte.attend(layout.gathered(x)))
        return logits_or_losses(logits, targets)


def _run_block(block: Block, x: jax.Array, positions: jax.Array | None) -> jax.Array:
    return block(x, positions)


def _linear(n_in: int, n_out: int, std: float, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(n_in, n_out, dtype=c.dtype, kernel_init=init, rngs=rngs)


def _embed(rows: int, c: GPTConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Embed(rows, c.n_embd, dtype=c.dtype, embedding_init=init, rngs=rngs)


def _layer_norm(c: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(c.n_embd, epsilon=LAYER_NORM_EPS, dtype=c.dtype, rngs=rngs)


def _dropout(c: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns dropout; at rate 0 without a random stream, so that the state is only parameters."""
    return nnx.Dropout(c.dropout, rngs=rngs if c.dropout else None)
