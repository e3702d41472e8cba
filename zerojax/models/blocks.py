"""Building blocks of all models: attention from scores, blocks one after another or stacked.

Shapes: B batch, T queries, S keys, H heads, d features of a head, L blocks.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.config import ModelConfig
from zerojax.models.loss import widen
from zerojax.offload.activations import remat_policy
from zerojax.xla.types import PyTree

INIT_STD = 0.02  # of the weights of GPT and Llama

Attention = Callable[..., jax.Array]
"""A function of q [B, T, H, d], k and v [B, S, G, d] to [B, T, H, d].

For rows with padding it also takes the keyword `mask`, bool [B, S], False on keys to leave out. A
query that sees no key has the result 0, as in PyTorch.
"""


Dropout = Callable[[jax.Array], jax.Array]


def attend(
    scores: jax.Array,
    values: jax.Array,
    mask: jax.Array | None = None,
    dropout: Dropout = lambda x: x,
) -> jax.Array:
    """Computes softmax(scores) values [B, T, H, d] for scores [B, H, T, S], values [B, S, H, d].

    The softmax is in fp32 or wider. A query attends to keys where `mask` (bool, broadcast to
    [B, H, T, S]) is True; if all its keys are masked, it attends to all keys.

    >>> scores, values = jnp.zeros((1, 1, 1, 3)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> attend(scores, values, jnp.array([True, True, False])).item()      # the mean of 0 and 1
    0.5
    """
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(widen(scores)).astype(values.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", dropout(weights), values)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    dropout: Dropout = lambda x: x,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Computes causal softmax(q k^T / sqrt(d)) v for `[B, T, H, d]`, softmax in fp32 or wider.

    `mask` is that of `Attention`. With `window`, a position attends to that many positions, the
    last of them itself. With `softcap` c, the scores s become
    c tanh(s / c). `positions` [B, T] are those of the queries among the S keys, by default the
    queries' columns.

    The product computes the scores in the inputs' dtype, and the softmax widens them: compiled for
    a GPU, a block of 25 heads and 4 x 1024 tokens needs 390 MB less at peak than with fp32 scores.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k)
    if softcap:
        scores = (softcap * jnp.tanh(widen(scores) / softcap)).astype(scores.dtype)
    queries, keys = scores.shape[-2:]
    if positions is None:
        positions = jnp.arange(queries)
    distances = positions[..., None] - jnp.arange(keys)  # [T, S] or [B, T, S]
    visible = distances >= 0
    if window is not None:
        visible &= distances < window
    if visible.ndim == 3:
        visible = visible[:, None]
    if mask is None:
        return attend(scores, v, visible, dropout)
    visible = visible & mask[:, None, None, :]
    sees_a_key = visible.any(-1).swapaxes(1, 2)[..., None]  # [B, T, 1, 1]
    return jnp.where(sees_a_key, attend(scores, v, visible, dropout), 0)


def grouped_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention of q [B, T, H, d] to k and v [B, S, G, d].

    Head h attends to key and value head h // (H / G). Keys and values are not repeated: the heads
    of a group are an extra dimension of q only. The mask and the options are those of
    `causal_attention`.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    attend_group = functools.partial(
        causal_attention, mask=mask, window=window, softcap=softcap, positions=positions
    )
    return jax.vmap(attend_group, (3, None, None), 3)(grouped, k, v).reshape(q.shape)


def with_mask(attention: Attention, mask: jax.Array | None) -> Attention:
    """Returns an attention that leaves out the keys where `mask` [B, S] is False, if there is one.

    An attention without the keyword `mask` serves rows without padding.
    """
    return attention if mask is None else functools.partial(attention, mask=mask)


def padding_mask(attention_mask: jax.Array | None, tokens: jax.Array) -> jax.Array | None:
    """Returns a batch's `attention_mask` as bool [B, T]: False where it is 0.

    Raises:
      ValueError: The mask has another shape than the tokens.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has shape {attention_mask.shape}, and the tokens {tokens.shape}: pass "
            "a number for each token, 0 on padding"
        )
    return attention_mask != 0


def keys_mask(mask: jax.Array | None) -> jax.Array | None:
    """Broadcasts a mask of keys [B, S] for scores [B, H, T, S]."""
    return None if mask is None else mask[:, None, None, :].astype(bool)


def dense(
    features: int, c: ModelConfig, std: float, name: str | None = None, *, use_bias: bool = True
) -> nn.Dense:
    """Returns a dense layer whose kernel starts with that standard deviation."""
    init = nn.initializers.normal(std)
    return nn.Dense(features, use_bias=use_bias, dtype=c.dtype, kernel_init=init, name=name)


def embed(
    rows: int, features: int, c: ModelConfig, std: float, name: str | None = None
) -> nn.Embed:
    """Returns a table [rows, features] that starts with that standard deviation."""
    init = nn.initializers.normal(std)
    return nn.Embed(rows, features, dtype=c.dtype, embedding_init=init, name=name)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Reshapes [..., D] to [..., H, d]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def run_blocks(
    block: type[nn.Module],
    config: ModelConfig,
    fields: Sequence[object],
    x: jax.Array,
    *inputs: object,
    layers: range,
    name: str,
    each: PyTree = None,
) -> tuple[jax.Array, PyTree]:
    """Runs blocks one after another, unrolled or stacked; must be called within a module.

    Args:
      block: The block's class; `__call__(x, each, *inputs)` returns x and a second result.
      config: The first argument of the block's constructor. Its `scan` stacks the blocks, so that
        one is compiled in place of all. With its `remat` a block saves only its input and
        recomputes the rest in the backward pass; or it names a policy for `zerojax.remat_policy`.
      fields: The other arguments.
      x: The input of the first block.
      inputs: Inputs that all blocks share.
      layers: Numbers of the blocks; they are part of the names of unrolled blocks.
      name: The name of the stack with leaves [L, ...]; unrolled blocks are `name_0`, `name_1`, ...
      each: The separate input of each block: leaves [L, ...] for a stack, a sequence for unrolled
        blocks.

    Returns:
      x after the last block, and the blocks' second results in the form of `each`.
    """
    if config.remat:
        # XLA does no CSE across iterations of a scan, so that the barrier would only cost time.
        block = nn.remat(block, prevent_cse=not config.scan, policy=policy_of(config.remat))
    if config.scan:
        stack = nn.scan(
            block,
            variable_axes={"params": 0, "cache": 0, "memory": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, *(nn.broadcast for _ in inputs)),
            length=len(layers),
        )
        return stack(config, *fields, name=name)(x, each, *inputs)
    block_inputs = each or [None] * len(layers)
    block_outputs = []
    for i, block_input in zip(layers, block_inputs, strict=True):
        x, block_output = block(config, *fields, name=f"{name}_{i}")(x, block_input, *inputs)
        block_outputs.append(block_output)
    return x, block_outputs


def policy_of(remat: bool | str) -> Callable[..., bool] | None:
    """Returns the policy that the option `remat` of a config names; None for only the input."""
    return remat_policy(remat) if isinstance(remat, str) else None


def last_tokens(x: jax.Array, tokens: jax.Array, pad_token_id: int | None) -> jax.Array:
    """Selects the features [B, D] of each row's last token other than padding from [B, T, D].

    Raises:
      ValueError: There are several rows, and `pad_token_id` is None.

    >>> x = jnp.arange(6.0).reshape(2, 3, 1)
    >>> last_tokens(x, jnp.array([[5, 6, 0], [0, 5, 7]]), 0).ravel().tolist()
    [1.0, 5.0]
    """
    if pad_token_id is None:
        if len(tokens) > 1:
            raise ValueError(
                "the config has no pad_token_id, which finds each row's last token: set it, or "
                "load the model with from_folder(folder, pad_token_id=...)"
            )
        return x[:, -1]
    positions = jnp.arange(tokens.shape[1])
    last = jnp.argmax(jnp.where(tokens == pad_token_id, 0, positions), axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


def check_length(tokens: jax.Array, config: ModelConfig, field: str) -> None:
    """Rejects rows [B, T] that are longer than a field of the model's config allows."""
    length, limit = tokens.shape[1], getattr(config, field)
    if length > limit:
        raise ValueError(f"{length} tokens in a row, but {field} = {limit}: cut the rows")
