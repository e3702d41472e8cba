"""Layers that DeBERTa and BART share: attention from scores, and unrolled or stacked blocks.

Shapes: B batch, T queries, S keys, H heads, d features of a head, L blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.loss import widen

Fields = tuple[Any, ...]


def attend(
    scores: jax.Array,
    values: jax.Array,
    mask: jax.Array | None = None,
    dropout: Callable[..., jax.Array] = lambda x: x,
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


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Reshapes [..., D] to [..., H, d]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def run_blocks(
    block: type[nn.Module],
    fields: Fields,
    x: jax.Array,
    *inputs: Any,
    layers: range,
    name: str,
    scan: bool,
    remat: bool,
    each: Any = None,
) -> tuple[jax.Array, Any]:
    """Runs blocks one after another, unrolled or stacked; must be called within a module.

    Args:
      block: The block's class; `__call__(x, each, *inputs)` returns x and a second result.
      fields: The arguments of the block's constructor.
      x: The input of the first block.
      inputs: Inputs that all blocks share.
      layers: Numbers of the blocks; they are part of the names of unrolled blocks.
      name: The name of the stack with leaves [L, ...]; unrolled blocks are `name_0`, `name_1`, ...
      scan: Whether the blocks are stacked, so that one is compiled in place of all.
      remat: Whether a block saves only its input and recomputes the rest in the backward pass.
      each: The separate input of each block: leaves [L, ...] for a stack, a sequence for unrolled
        blocks.

    Returns:
      x after the last block, and the blocks' second results in the form of `each`.
    """
    if remat:
        # XLA does no CSE across iterations of a scan, so that the barrier would only cost time.
        block = nn.remat(block, prevent_cse=not scan)
    if scan:
        stack = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, *(nn.broadcast for _ in inputs)),
            length=len(layers),
        )
        return stack(*fields, name=name)(x, each, *inputs)
    block_inputs: Sequence[Any] = each or [None] * len(layers)
    block_outputs = []
    for i, block_input in zip(layers, block_inputs, strict=True):
        x, block_output = block(*fields, name=f"{name}_{i}")(x, block_input, *inputs)
        block_outputs.append(block_output)
    return x, block_outputs
